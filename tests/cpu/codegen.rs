//! Bodies over the memory hierarchy: what is generated is what is committed, and nothing in it is too little or too
//! much.

use perpetua::codegen::bodies::{File, files, flash_attention};
use perpetua::codegen::emit::emit;
use perpetua::codegen::judge::judge;
use perpetua::codegen::plan::{Act, Plan, plan};
use perpetua::codegen::{
    Body, By, CAPACITY, Expr, Extent, GlobalId, LoopId, Op, Place, Start, Step, TileId, Update, Whose, check, of,
};
use perpetua_device::kernels::attention::FLASH_BYTES;
use proptest::prelude::*;
use std::path::Path;

/// `text` without what rustfmt may change: spaces, line breaks, commas before a closing bracket.
fn without_layout(text: &str) -> String {
    let mut bare = String::new();
    for c in text.chars().filter(|c| !c.is_whitespace()) {
        if matches!(c, ')' | ']' | '}') && bare.ends_with(',') {
            bare.pop();
        }
        bare.push(c);
    }
    bare
}

fn plans(file: &File) -> Vec<Plan> {
    file.bodies.iter().map(plan).collect()
}

#[test]
fn generated_files_are_those_that_are_committed() {
    for file in files() {
        for body in &file.bodies {
            check(body).expect(&body.name);
        }
        let text = emit(&file, &plans(&file));
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(file.path);
        if std::env::var_os("BLESS").is_some() {
            std::fs::write(&path, &text).expect("the file can be written");
            let formatted = std::process::Command::new("rustfmt").args(["--edition", "2024"]).arg(&path).status();
            assert!(formatted.is_ok_and(|status| status.success()), "rustfmt has not formatted {}", file.path);
        }
        let committed = std::fs::read_to_string(&path).expect("the file can be read");
        assert!(
            without_layout(&committed) == without_layout(&text),
            "{} is not what its bodies make; BLESS=1 writes it anew:\n{text}",
            file.path
        );
    }
}

/// What attention says that it takes beside tiles is what its bodies are made with.
#[test]
fn attention_takes_the_memory_that_it_says() {
    for (bodies, bytes) in [("_64", FLASH_BYTES[0]), ("_128", FLASH_BYTES[1])] {
        let flash = &files()[0];
        let mut n = 0;
        for body in flash.bodies.iter().filter(|body| body.name.ends_with(bodies)) {
            let taken: u64 = (0..body.tiles.len()).map(|tile| u64::from(body.bytes(TileId(tile)))).sum();
            assert_eq!(taken, bytes, "{}", body.name);
            n += 1;
        }
        assert_eq!(n, 2, "alone, and in shares");
    }
}

#[test]
fn barriers_and_waits_are_enough_and_each_is_needed() {
    for plan in files().iter().flat_map(plans) {
        judge(&plan).expect(&plan.body.name);
        let mut n_needed = 0;
        for path in plan.paths() {
            let Some(act @ (Act::Meet(_) | Act::Await(_))) = plan.act(&path) else { continue };
            n_needed += 1;
            assert!(judge(&plan.without(&path)).is_err(), "{}: {act:?} at {path:?} is not needed", plan.body.name);
        }
        println!("{}: {n_needed} barriers and waits", plan.body.name);
        assert!(n_needed > 0);
    }
}

/// Chooses by a seed: splitmix64.
pub(crate) struct Choices(pub(crate) u64);

impl Choices {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u32) -> u32 {
        (self.next() % u64::from(n)) as u32
    }
}

/// What all random bodies have.
struct Tiles {
    x: GlobalId,
    y: GlobalId,
    own: [TileId; 2],
    eights: TileId,
    sixteens: TileId,
}

/// At the innermost loop's place.
fn innermost(open: &[LoopId]) -> Start {
    open.last().map_or(Start::FIRST, |id| Start::at(*id))
}

/// A body of nested loops in which tiles are loaded, by one to four stages, split, multiplied, kept and written as it
/// comes.
fn random_body(choices: &mut Choices) -> Body {
    let (mut body, [x, y]) = Body::new("random", "", ["x", "y"]);
    let own = ["first", "second"].map(|name| body.tile(name, Place::Own { columns: 64 }));
    let eights = body.tile("eights", Place::Eights { columns: 64 });
    let sixteens = body.tile("sixteens", Place::Sixteens { columns: 64 });
    own.iter().for_each(|to| body.op(Op::Split { to: *to, from: x, column: Start::FIRST }));
    [eights, sixteens].iter().for_each(|to| body.op(Op::Fill { to: *to, value: 0.0 }));
    let tiles = Tiles { x, y, own, eights, sixteens };
    random_steps(choices, &mut body, &tiles, &[], &mut Vec::new());
    body.op(Op::Keep { to: tiles.own[0], from: tiles.sixteens });
    body.op(Op::Write { to: y, from: tiles.own[0], column: Start::FIRST, update: Update::Set });
    body
}

/// Adds steps inside loops `open`; `loaded` are the tiles that are there.
fn random_steps(choices: &mut Choices, body: &mut Body, tiles: &Tiles, open: &[LoopId], loaded: &mut Vec<TileId>) {
    let stages = if open.is_empty() { 1 } else { 1 + choices.below(4) };
    let here = loaded.len();
    for _ in 0..choices.below(3) {
        let tile = body.tile(&format!("w{}", body.tiles.len()), Place::Shared { rows: 64, columns: 64, stages });
        body.op(Op::Load { to: tile, from: tiles.x, row: innermost(open), column: Start::FIRST });
        loaded.push(tile);
    }
    let mut unread = loaded[here..].to_vec();
    for _ in 0..1 + choices.below(5) {
        match choices.below(6) {
            0 if open.len() < 2 => {
                let name = format!("n{}_{}", open.len(), body.tiles.len());
                // Through a list of its own, since what is added in the loop is added to the body.
                let (mut inner_open, mut inner_loaded) = (open.to_vec(), loaded.clone());
                body.each(&name, 64, Extent::Rows(tiles.x), |body, id| {
                    inner_open.push(id);
                    random_steps(choices, body, tiles, &inner_open, &mut inner_loaded);
                });
            }
            1 => {
                let to = tiles.own[choices.below(2) as usize];
                body.op(Op::Split { to, from: tiles.x, column: innermost(open) });
            }
            2 => {
                let own = tiles.own[choices.below(2) as usize];
                let from = if choices.below(2) == 0 { tiles.eights } else { tiles.sixteens };
                body.op(Op::Keep { to: own, from });
                body.op(Op::Write { to: tiles.y, from: own, column: Start::FIRST, update: Update::Set });
            }
            _ => {
                let known = loaded.len() as u32;
                let next = unread.pop().or_else(|| (known > 0).then(|| loaded[choices.below(known) as usize]));
                let Some(b) = next else { continue };
                multiply(choices, body, tiles, b);
            }
        }
    }
    for b in unread {
        multiply(choices, body, tiles, b);
    }
    loaded.truncate(here);
}

fn multiply(choices: &mut Choices, body: &mut Body, tiles: &Tiles, b: TileId) {
    let (into, a, by) = match choices.below(2) {
        0 => (tiles.eights, tiles.own[choices.below(2) as usize], By::Rows),
        _ => (tiles.sixteens, tiles.eights, By::Columns),
    };
    body.op(Op::Product { into, a, b, by });
}

/// A random body's plan; none of a body that has no room, which the generator does not count.
fn random_plan(seed: u64) -> Option<Plan> {
    let body = random_body(&mut Choices(seed));
    let bytes: u32 = (0..body.tiles.len()).map(|at| body.bytes(TileId(at))).sum();
    (bytes <= CAPACITY).then(|| {
        check(&body).expect("a random body keeps the rules");
        plan(&body)
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_bodies_wait_enough(seed in any::<u64>()) {
        if let Some(plan) = random_plan(seed) {
            judge(&plan).map_err(|wrong| TestCaseError::fail(format!("{wrong}\n{plan}")))?;
        }
    }
}

/// Of many loops, of which one has to go round while others do not: chance seldom comes upon that.
#[test]
fn a_body_of_many_loops_waits_enough() {
    let plan = random_plan(1_534_413_607_889_961_569).expect("there is room for this one");
    judge(&plan).unwrap_or_else(|wrong| panic!("{wrong}\n{plan}"));
}

/// Of these bodies; of others the judge's runs may be too few to show what a barrier is for.
#[test]
fn random_bodies_have_nothing_superfluous() {
    let mut n_needed = 0;
    for plan in (0..120).filter_map(random_plan) {
        for path in plan.paths() {
            if let Some(act @ (Act::Meet(_) | Act::Await(_))) = plan.act(&path) {
                assert!(judge(&plan.without(&path)).is_err(), "{act:?} at {path:?} is not needed:\n{plan}");
                n_needed += 1;
            }
        }
    }
    assert!(n_needed > 500, "only {n_needed} barriers and waits to take out");
}

/// Each rule of a body, broken.
#[test]
fn bodies_that_break_a_rule_are_refused_by_name() {
    let refused = |change: &dyn Fn(&mut Body), what: &str| {
        let mut body = flash_attention(64, 64);
        change(&mut body);
        let wrong = check(&body).expect_err(what).join("\n");
        assert!(wrong.contains(what), "{wrong}, expected {what}");
    };
    let from = |body: &mut Body, from: GlobalId, to: TileId| {
        body.op(Op::Split { to, from, column: Start::FIRST });
    };
    refused(&|body| from(body, GlobalId(0), TileId(99)), "has tile 99, of which there are");
    refused(&|body| from(body, GlobalId(9), TileId(0)), "are of operand 9, of which there are 4");
    refused(&|body| body.rows = GlobalId(9), "the body's rows are of operand 9");
    refused(&|body| body.globals[1].through = Some((GlobalId(1), "which".to_owned())), "expected one before it");
    refused(&|body| body.each("n", 1, Extent::Rows(GlobalId(9)), |_, _| {}), "the rounds of loop `n` are of operand 9");
    refused(&|body| body.op(Op::Map { to: TileId(0), expr: Expr::Scalar("no".to_owned()) }), "`no` is no argument");
    let ask = |body: &mut Body, of: &str, to: TileId| body.op(Op::Ask { to, of: of.to_owned() });
    refused(&|body| ask(body, "no", TileId(0)), "`no` is no argument of the body that says something of rows");
    refused(&|body| ask(body, "sinks", TileId(0)), "expected a number for each row");
    for name in ["fn 1", "fn", "1", "", "_", "k\u{e9}y"] {
        refused(&|body| body.tiles[0].name = name.to_owned(), &format!("a tile is called `{name}`, expected a Rust"));
    }
    refused(&|body| body.tiles[0].name = body.tiles[1].name.clone(), "as a tile is, expected a name of its own");
    refused(&|body| body.tiles[0].name = body.globals[0].name.clone(), "as an operand is, expected a name of its own");
    let nested = |body: &mut Body| {
        body.each("n", 1, Extent::Rows(GlobalId(0)), |body, _| {
            body.each("n", 1, Extent::Rows(GlobalId(0)), |_, _| {});
        });
    };
    refused(&nested, "a loop is called `n`, as a loop is");
    let tile = |body: &mut Body, name: &str, place: Place| {
        body.tiles.iter_mut().find(|tile| tile.name == name).expect("a tile of that name").place = place;
    };
    refused(&|body| tile(body, "keys", Place::Shared { rows: 48, columns: 64, stages: 2 }), "`keys` is Shared");
    refused(&|body| tile(body, "sums", Place::Eights { columns: 64 }), "expected Sixteens { columns: 64 }");
    refused(&|body| tile(body, "keys", Place::Shared { rows: 64, columns: 64, stages: 3 }), "are loaded together");
    refused(
        &|body| tile(body, "queries", Place::Own { columns: 128 }),
        "`queries` is Own { columns: 128 }, expected Own { columns: 64 }",
    );
    refused(&|body| tile(body, "max", Place::Own { columns: 64 }), "`max` is Own");
    refused(&|body| drop(body.steps.remove(1)), "`sums` is read by");
    let grow = |body: &mut Body| {
        for name in ["keys", "values"] {
            tile(body, name, Place::Shared { rows: 64, columns: 64, stages: 20 });
        }
    };
    refused(&grow, "bytes of shared memory, expected at most");
    // More than 2^32 bytes, whose low bits are few.
    refused(
        &|body| {
            for name in ["keys", "values"] {
                tile(body, name, Place::Shared { rows: 64, columns: 64, stages: 1 << 19 });
            }
        },
        "bytes of shared memory, expected at most",
    );
    let (of_y, of_q) = (GlobalId(3), GlobalId(0));
    let last = |body: &mut Body, change: &dyn Fn(&mut Op)| {
        let Some(Step::Op(op)) = body.steps.last_mut() else { panic!("the last step is the write") };
        change(op);
    };
    refused(
        &|body| {
            last(body, &|op| {
                if let Op::Write { column, .. } = op {
                    *column = Start::FIRST.plus(2);
                }
            });
        },
        "expected multiples of 4",
    );
    refused(
        &|body| {
            last(body, &|op| {
                if let Op::Write { column, .. } = op {
                    *column = Start::at(LoopId(0));
                }
            });
        },
        "the place of a loop it is not in",
    );
    refused(
        &|body| {
            last(body, &|op| {
                if let Op::Write { to, .. } = op {
                    *to = of_q;
                }
            });
        },
        "`q` is read and written",
    );
    let found = |body: &Body, name: &str| {
        TileId(body.tiles.iter().position(|tile| tile.name == name).expect("a tile of that name"))
    };
    let also = |body: &mut Body, name: &str, update| {
        let write = Op::Write { to: of_y, from: found(body, name), column: Start::FIRST.plus(1), update };
        body.op(write);
    };
    refused(&|body| also(body, "total", Update::Set), "columns 1 to 2 of `y` may be written twice");
    refused(&|body| also(body, "total", Update::Add), "expected Own, or PerRow where it is set");
    refused(
        &|body| {
            let sums = found(body, "sums");
            let other = body.tile("other", Place::Sixteens { columns: 64 });
            body.op(Op::Fill { to: other, value: 1.0 });
            body.op(Op::Map { to: sums, expr: of(sums) + of(other) });
        },
        "`sums` is made of 2 tiles of its shape, expected one",
    );
    refused(
        &|body| {
            let to = found(body, "total");
            body.op(Op::Read { to, from: of_q, rows: Whose::First, column: Start::FIRST });
        },
        "expected Eights, or PerRow of each row",
    );
    refused(
        &|body| {
            let from = found(body, "queries");
            body.each("c", 32, Extent::Columns(of_y), |body, c| {
                body.op(Op::Write { to: of_y, from, column: Start::at(c), update: Update::Set });
            });
        },
        "are written in each round of a loop by fewer",
    );
    let load_again = |body: &mut Body| {
        let Some(Step::Loop(inner)) = body.steps.iter_mut().find(|step| matches!(step, Step::Loop(_))) else { return };
        let load = inner.steps[0].clone();
        inner.steps.push(load);
    };
    refused(&load_again, "loaded 2 times");
}
