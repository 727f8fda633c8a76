//! What the worker holds over all bodies: registers of its PTX that are live where it chooses among them. Each is one
//! that no body has.
//!
//! PTX has as many registers as it likes, and none that is nobody's: where a value is there on one way and is not
//! looked at on the others, as a `Result`'s words are, it is live on all ways that lead there, around the worker's loop
//! and through every body.

use std::collections::HashMap;

/// A statement: what it sets and reads, by number, where it may jump, and whether it may go on with the next.
#[derive(Debug, Default)]
struct Statement {
    sets: Vec<usize>,
    reads: Vec<usize>,
    targets: Vec<usize>,
    ends: bool,
}

/// What has no destination, by how it begins.
const NO_RESULT: &[&str] = &[
    "st.",
    "red.",
    "bar.sync",
    "bar.warp",
    "barrier.sync",
    "barrier.cta.sync",
    "fence",
    "membar",
    "mbarrier.init",
    "mbarrier.arrive",
    "cp.",
    "prefetch",
    "nanosleep",
    "wgmma.",
    "stmatrix",
];

/// The registers named in `text`, by number, and their words: 64 bits are two, a predicate none.
#[derive(Default)]
struct Names<'a> {
    numbers: HashMap<&'a str, usize>,
    words: Vec<u32>,
}

impl<'a> Names<'a> {
    fn of(&mut self, text: &'a str) -> Vec<usize> {
        let is_name = |c: char| c.is_ascii_alphanumeric();
        let names = text.match_indices('%').map(|(at, _)| {
            let rest = &text[at + 1..];
            &rest[..rest.find(|c| !is_name(c)).unwrap_or(rest.len())]
        });
        let registers = names.filter(|name| name.ends_with(|c: char| c.is_ascii_digit()));
        registers
            .map(|name| {
                let next = self.numbers.len();
                *self.numbers.entry(name).or_insert_with(|| {
                    let kind = name.trim_end_matches(|c: char| c.is_ascii_digit());
                    self.words.push(if kind.ends_with('d') { 2 } else { u32::from(kind != "p") });
                    next
                })
            })
            .collect()
    }
}

/// Where the first operand of `operands` ends.
fn first_end(operands: &str) -> usize {
    let mut depth = 0;
    let ends = operands.char_indices().find(|(_, c)| {
        depth += i32::from("{[(".contains(*c)) - i32::from("}])".contains(*c));
        *c == ',' && depth == 0
    });
    ends.map_or(operands.len(), |(at, _)| at)
}

/// Words live at the `brx.idx` of `body` with the most targets.
pub(crate) fn held(body: &str) -> u32 {
    // Of comments the source's own too, which hold a value back: what they name is set before and read after.
    let is_code = |line: &&str| !line.trim_start().starts_with("/*");
    let lines = body.lines().filter(is_code).map(|line| line.split("//").next().unwrap_or(""));
    let text: String = lines.flat_map(|line| [line.trim(), "\n"]).collect();
    // Statements with what is before them taken off; places of labels, and the tables that some name.
    let (mut statements, mut labels, mut tables) = (Vec::new(), HashMap::new(), HashMap::new());
    for part in text.split(';') {
        let around = |c: char| "{}".contains(c) || c.is_whitespace();
        let mut part = part.trim_matches(around);
        let mut label = None;
        while let Some((before, after)) = part.split_once(':').filter(|(before, _)| before.starts_with("$L")) {
            labels.insert(before, statements.len());
            (label, part) = (Some(before), after.trim_matches(around));
        }
        if let Some(targets) = part.strip_prefix(".branchtargets") {
            tables.insert(label.expect("a table has a label"), targets.split(',').map(str::trim).collect::<Vec<_>>());
        } else if !part.is_empty() && !part.starts_with('.') {
            statements.push(part);
        }
    }
    let mut names = Names::default();
    let mut parsed: Vec<Statement> = Vec::new();
    let mut chooser = (0, 0);
    for (at, text) in statements.iter().enumerate() {
        let mut statement = Statement::default();
        let (guard, text) = match text.strip_prefix('@') {
            Some(rest) => rest.split_once(char::is_whitespace).expect("a guard guards something"),
            None => ("", *text),
        };
        statement.reads = names.of(guard);
        let (opcode, operands) = text.trim().split_once(char::is_whitespace).unwrap_or((text, ""));
        let place = |label: &str| *labels.get(label.trim()).unwrap_or_else(|| panic!("no label {label:?} in {text:?}"));
        if opcode.starts_with("brx") {
            let (index, table) = operands.split_once(',').expect("an index and a table");
            statement.reads.extend(names.of(index));
            statement.targets = tables[table.trim()].iter().map(|label| place(label)).collect();
            let mut distinct = statement.targets.clone();
            distinct.sort_unstable();
            distinct.dedup();
            chooser = chooser.max((distinct.len(), usize::MAX - at));
        } else if opcode.starts_with("bra") {
            statement.targets = vec![place(operands)];
        } else if NO_RESULT.iter().any(|begins| opcode.starts_with(begins)) {
            statement.reads.extend(names.of(operands));
            if opcode.starts_with("wgmma.mma") {
                // Its sums are both.
                statement.sets = names.of(&operands[..first_end(operands)]);
            }
        } else {
            let (first, others) = operands.split_at(first_end(operands));
            let is_address = first.trim_start().starts_with('[');
            let of_first = names.of(first);
            // What is set on some lanes only keeps the others'.
            statement.reads.extend(names.of(others));
            statement.reads.extend(of_first.iter().filter(|_| is_address || !guard.is_empty()));
            statement.sets = if is_address { Vec::new() } else { of_first };
        }
        let leaves = ["bra", "brx", "ret", "exit", "trap"].iter().any(|begins| opcode.starts_with(begins));
        statement.ends = leaves && guard.is_empty();
        parsed.push(statement);
    }
    let live = live_before(&parsed, names.words.len(), usize::MAX - chooser.1);
    (0..names.words.len())
        .filter(|register| live[register / 64] >> (register % 64) & 1 == 1)
        .map(|at| names.words[at])
        .sum()
}

/// The registers, a bit each, live before statement `at`.
fn live_before(statements: &[Statement], n_registers: usize, at: usize) -> Vec<u64> {
    // Blocks begin where something jumps to or comes after a jump, and at `at`.
    let mut begins = vec![false; statements.len() + 1];
    (begins[0], begins[at], begins[statements.len()]) = (true, true, true);
    for (number, statement) in statements.iter().enumerate() {
        statement.targets.iter().for_each(|target| begins[*target] = true);
        begins[number + 1] |= statement.ends || !statement.targets.is_empty();
    }
    let starts: Vec<usize> = (0..=statements.len()).filter(|number| begins[*number]).collect();
    let block_of = |number: usize| starts.partition_point(|start| *start <= number) - 1;
    let n_blocks = starts.len() - 1;
    let words = n_registers.div_ceil(64);
    let mut live = vec![vec![0u64; words]; n_blocks + 1];
    let mut before = vec![Vec::new(); n_blocks + 1];
    for block in 0..n_blocks {
        let last = &statements[starts[block + 1] - 1];
        let next = (!last.ends).then_some(block + 1);
        last.targets.iter().map(|target| block_of(*target)).chain(next).for_each(|after| before[after].push(block));
    }
    let mut work: Vec<usize> = (0..n_blocks).collect();
    while let Some(block) = work.pop() {
        let range = starts[block]..starts[block + 1];
        let last = &statements[range.end - 1];
        let mut now = vec![0u64; words];
        let next = (!last.ends).then_some(block + 1);
        for after in last.targets.iter().map(|target| block_of(*target)).chain(next) {
            now.iter_mut().zip(&live[after]).for_each(|(now, live)| *now |= live);
        }
        for statement in statements[range].iter().rev() {
            statement.sets.iter().for_each(|register| now[register / 64] &= !(1 << (register % 64)));
            statement.reads.iter().for_each(|register| now[register / 64] |= 1 << (register % 64));
        }
        if now != live[block] {
            live[block] = now;
            work.extend(&before[block]);
        }
    }
    live.swap_remove(block_of(at))
}

#[test]
fn what_is_nobodys_on_one_way_is_held_on_all() {
    // %r2 is set on one way and read on the same, behind a second look at %p1; %r3 is set before it is read on all.
    let body = "
        mov.u32 %r1, %tid.x;
        setp.eq.s32 %p1, %r1, 0;
    $L_loop:
        add.s64 %rd1, %rd1, 1;
        brx.idx %r1, $L_table;
    $L_table: .branchtargets
        $L_a,
        $L_b;
    $L_a:
        @!%p1 bra $L_b;
        ld.global.u32 %r2, [%rd1];
    $L_b:
        mov.u32 %r3, 7;
        @!%p1 bra $L_loop;
        st.global.v2.u32 [%rd1], {%r2, %r3};
        bra.uni $L_loop;
    ";
    // %r1, %rd1 and %r2, which a compiler that could tell would not hold.
    assert_eq!(held(body), 4);
    assert_eq!(held(&body.replace("$L_a:", "$L_a: mov.u32 %r2, 0;").replace("$L_b;\n    $L_a", "$L_a;\n    $L_a")), 3);
}
