//! PTX as text, taken apart: variables, entries, and each entry's statements.
//!
//! What LLVM writes and nothing more: one operand list to an instruction, no expressions, no functions but entries.

use super::PtxError;

/// A variable of the module: `.shared .align 16 .b8 name[bytes];`.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Variable<'a> {
    pub(super) name: &'a str,
    pub(super) space: &'a str,
    pub(super) align: u32,
    /// 0: as many as the launch says.
    pub(super) bytes: u32,
    /// Its first bytes; the others are 0.
    pub(super) init: Vec<u8>,
}

/// `.visible .entry name( .param .align 8 .b8 name_param_0[216], ... )` with its body.
#[derive(Debug)]
pub(super) struct EntryText<'a> {
    pub(super) name: &'a str,
    /// Names, alignments and bytes.
    pub(super) params: Vec<(&'a str, u32, u32)>,
    /// `.maxntid`, if it is there.
    pub(super) most_threads: Option<u32>,
    pub(super) body: Vec<(u32, Statement<'a>)>,
}

/// A statement of an entry's body, which begins on the line that stands beside it.
#[derive(Debug, PartialEq)]
pub(super) enum Statement<'a> {
    /// `{`: names declared from here on are the block's.
    Open,
    /// `}`.
    Close,
    /// `name:`.
    Label(&'a str),
    /// `.reg .b32 name<n>;`, or without a number.
    Registers { kind: &'a str, name: &'a str, n: Option<u32> },
    /// `name: .branchtargets a, b, c;`.
    Targets(&'a str, Vec<&'a str>),
    /// Anything else: `@!guard opcode operands;`.
    Instruction { guard: Option<(bool, &'a str)>, opcode: &'a str, operands: Vec<Operand<'a>> },
}

/// An operand as it is written.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Operand<'a> {
    /// A register, a variable, a parameter or a label.
    Name(&'a str),
    /// `{a, b}`.
    Vector(Vec<Operand<'a>>),
    /// `[base+offset]`.
    Address(&'a str, i64),
    /// A number: the bits of an integer, sign-extended, or of a float.
    Number(u64),
    /// `_`: the value is not wanted.
    Nothing,
}

/// The variables and entries of `text`.
pub(super) fn parse(text: &str) -> Result<(Vec<Variable<'_>>, Vec<EntryText<'_>>), PtxError> {
    let mut reader = Reader { text, at: 0, line: 1 };
    let (mut variables, mut entries) = (Vec::new(), Vec::new());
    while let Some(word) = reader.peek()? {
        let line = reader.line;
        match word {
            ".version" | ".target" | ".address_size" => reader.skip_line(),
            ".visible" | ".weak" | ".extern" => drop(reader.word()?),
            ".entry" => entries.push(entry(&mut reader)?),
            ".shared" | ".global" | ".const" => variables.push(variable(&mut reader)?),
            _ => return Err(PtxError::unread(line, format!("`{word}` is not understood here"))),
        }
    }
    Ok((variables, entries))
}

fn variable<'a>(reader: &mut Reader<'a>) -> Result<Variable<'a>, PtxError> {
    let line = reader.line;
    let statement = reader.until(';')?;
    let unread = || PtxError::unread(line, format!("the variable `{}` is not understood", statement.trim()));
    let (head, init) = statement.split_once('=').map_or((statement, ""), |(head, init)| (head, init));
    let words: Vec<&str> = head.split_whitespace().collect();
    let [space, ".align", align, ".b8", name] = words[..] else { return Err(unread()) };
    let (name, bytes) = name.strip_suffix(']').and_then(|name| name.split_once('[')).ok_or_else(unread)?;
    let bytes = if bytes.is_empty() { 0 } else { bytes.parse().map_err(|_| unread())? };
    let init = init.trim().trim_start_matches('{').trim_end_matches('}');
    let init = init.split(',').map(str::trim).filter(|byte| !byte.is_empty()).map(str::parse);
    Ok(Variable {
        name,
        space,
        align: align.parse().map_err(|_| unread())?,
        bytes,
        init: init.collect::<Result<_, _>>().map_err(|_| unread())?,
    })
}

fn entry<'a>(reader: &mut Reader<'a>) -> Result<EntryText<'a>, PtxError> {
    reader.word()?;
    let line = reader.line;
    let name = reader.until('(')?.trim();
    let mut params = Vec::new();
    for param in reader.until(')')?.split(',').map(str::trim).filter(|param| !param.is_empty()) {
        let unread = || PtxError::unread(line, format!("the parameter `{param}` of {name} is not understood"));
        let words: Vec<&str> = param.split_whitespace().collect();
        params.push(match words[..] {
            [".param", ".align", align, ".b8", array] => {
                let (name, bytes) = array.strip_suffix(']').and_then(|it| it.split_once('[')).ok_or_else(unread)?;
                (name, align.parse().map_err(|_| unread())?, bytes.parse().map_err(|_| unread())?)
            }
            [".param", kind, .., name] => {
                let bytes = bits_of(kind).ok_or_else(unread)? / 8;
                (name, bytes, bytes)
            }
            _ => return Err(unread()),
        });
    }
    let mut most_threads = None;
    let directives = reader.until('{')?;
    for directive in directives.split('.').map(str::trim) {
        if let Some(threads) = directive.strip_prefix("maxntid") {
            let first = threads.split(',').next().unwrap_or("").trim();
            let unread = |_| PtxError::unread(line, format!("`.{directive}` is not understood"));
            most_threads = Some(first.parse().map_err(unread)?);
        }
    }
    let (mut body, mut depth) = (Vec::new(), 1);
    while depth > 0 {
        // Advice to the assembler.
        if reader.peek()? == Some(".pragma") {
            reader.until(';')?;
            continue;
        }
        let statement = statement(reader)?;
        depth += match statement.1 {
            Statement::Open => 1,
            Statement::Close => -1,
            _ => 0,
        };
        if depth > 0 {
            body.push(statement);
        }
    }
    Ok(EntryText { name, params, most_threads, body })
}

/// Bits of a type: `.b32`, `.u64`, `.f32`.
fn bits_of(kind: &str) -> Option<u32> {
    let bits = kind.strip_prefix('.')?.trim_start_matches(|c: char| c.is_ascii_alphabetic());
    bits.parse().ok().filter(|bits| [8, 16, 32, 64].contains(bits))
}

fn statement<'a>(reader: &mut Reader<'a>) -> Result<(u32, Statement<'a>), PtxError> {
    let Some(word) = reader.peek()? else {
        return Err(PtxError::unread(reader.line, "the text ends inside an entry".to_owned()));
    };
    let line = reader.line;
    if word.starts_with(['{', '}']) {
        reader.at += 1;
        return Ok((line, if word.starts_with('{') { Statement::Open } else { Statement::Close }));
    }
    if let Some(label) = word.strip_suffix(':') {
        reader.word()?;
        if reader.peek()? != Some(".branchtargets") {
            return Ok((line, Statement::Label(label)));
        }
        reader.word()?;
        let targets = reader.until(';')?;
        return Ok((line, Statement::Targets(label, targets.split(',').map(str::trim).collect())));
    }
    let text = reader.until(';')?.trim();
    let unread = || PtxError::unread(line, format!("`{text}` is not understood"));
    if let Some(registers) = text.strip_prefix(".reg") {
        let mut words = registers.split_whitespace();
        let (kind, name) = words.next().zip(words.next()).ok_or_else(unread)?;
        let counted = name.strip_suffix('>').and_then(|name| name.split_once('<'));
        let (name, n) = match counted {
            Some((name, n)) => (name, Some(n.parse().map_err(|_| unread())?)),
            None => (name, None),
        };
        return Ok((line, Statement::Registers { kind, name, n }));
    }
    let (guard, rest) = match text.strip_prefix('@') {
        None => (None, text),
        Some(guarded) => {
            let (guard, rest) = guarded.split_once(char::is_whitespace).ok_or_else(unread)?;
            let name = guard.strip_prefix('!');
            (Some((name.is_none(), name.unwrap_or(guard))), rest.trim_start())
        }
    };
    let (opcode, rest) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
    let operands = operands(rest).ok_or_else(unread)?;
    Ok((line, Statement::Instruction { guard, opcode, operands }))
}

/// `a, {b, c}, [d+4], 5`.
fn operands(text: &str) -> Option<Vec<Operand<'_>>> {
    let mut found = Vec::new();
    let mut rest = text.trim();
    while !rest.is_empty() {
        let end = match rest.chars().next()? {
            '{' => rest.find('}')? + 1,
            '[' => rest.find(']')? + 1,
            _ => rest.find(',').unwrap_or(rest.len()),
        };
        // What follows a number in brackets is `|` or `,`: LLVM writes the latter only.
        found.push(operand(rest[..end].trim())?);
        rest = rest[end..].trim_start();
        rest = match rest.strip_prefix(',') {
            Some(more) => more.trim_start(),
            None if rest.is_empty() => rest,
            None => return None,
        };
    }
    Some(found)
}

fn operand(text: &str) -> Option<Operand<'_>> {
    if let Some(inside) = text.strip_prefix('{') {
        return Some(Operand::Vector(operands(inside.strip_suffix('}')?)?));
    }
    if let Some(inside) = text.strip_prefix('[') {
        let inside = inside.strip_suffix(']')?;
        let (base, offset) = inside.split_once('+').unwrap_or((inside, "0"));
        return Some(Operand::Address(base.trim(), offset.trim().parse().ok()?));
    }
    Some(match text {
        "_" => Operand::Nothing,
        _ if text.starts_with(|c: char| c.is_ascii_digit() || c == '-') => Operand::Number(number(text)?),
        _ => Operand::Name(text),
    })
}

fn number(text: &str) -> Option<u64> {
    if let Some(bits) = text.strip_prefix("0f").or_else(|| text.strip_prefix("0d")).or_else(|| text.strip_prefix("0x"))
    {
        return u64::from_str_radix(bits, 16).ok();
    }
    text.parse::<i64>().map(i64::cast_unsigned).or_else(|_| text.parse()).ok()
}

/// Where reading has come to.
struct Reader<'a> {
    text: &'a str,
    at: usize,
    line: u32,
}

impl<'a> Reader<'a> {
    /// Past white space and comments.
    fn skip(&mut self) -> Result<(), PtxError> {
        loop {
            let rest = &self.text[self.at..];
            let skipped = if rest.starts_with("//") {
                rest.find('\n').unwrap_or(rest.len())
            } else if rest.starts_with("/*") {
                let unread = || PtxError::unread(self.line, "a comment does not end".to_owned());
                rest.find("*/").ok_or_else(unread)? + 2
            } else {
                rest.len() - rest.trim_start().len()
            };
            if skipped == 0 {
                return Ok(());
            }
            self.advance(skipped);
        }
    }

    fn advance(&mut self, bytes: usize) {
        let passed = &self.text[self.at..self.at + bytes];
        self.line += passed.bytes().filter(|byte| *byte == b'\n').count() as u32;
        self.at += bytes;
    }

    /// The next word, which stays: up to white space.
    fn peek(&mut self) -> Result<Option<&'a str>, PtxError> {
        self.skip()?;
        Ok(self.text[self.at..].split_whitespace().next())
    }

    fn word(&mut self) -> Result<Option<&'a str>, PtxError> {
        let word = self.peek()?;
        self.advance(word.map_or(0, str::len));
        Ok(word)
    }

    fn skip_line(&mut self) {
        let rest = &self.text[self.at..];
        self.advance(rest.find('\n').map_or(rest.len(), |end| end + 1));
    }

    /// What stands before `end`, which is passed.
    fn until(&mut self, end: char) -> Result<&'a str, PtxError> {
        let rest = &self.text[self.at..];
        let unread = || PtxError::unread(self.line, format!("`{end}` is missing"));
        let length = rest.find(end).ok_or_else(unread)?;
        self.advance(length + end.len_utf8());
        Ok(&rest[..length])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "//\n// head\n.version 8.6\n.target sm_90a\n.address_size 64\n\
        .shared .align 16 .b8 words[64];\n.extern .shared .align 128 .b8 tiles[];\n\
        .global .align 4 .b8 table[4] = {1, 2, 3};\n\
        .visible .entry double(\n\t.param .align 8 .b8 double_param_0[24],\n\t.param .u32 double_param_1\n)\n\
        .maxntid 64, 1, 1\n.minnctapersm 1\n{\n\t.reg .pred \t%p<2>;\n$L0:\n\t@!%p1 bra \t$L0;\n\
        \t{\n.reg .pred over;\n}\n\t/* a comment; */ ld.v2.b32 \t{%r1, _}, [%rd1+-8];\n\
        \tmov.b32 %r2, 0f3F800000; // one\n\t$T: .branchtargets\n\t\t$L0,\n\t\t$L1;\n\tret;\n}\n";

    #[test]
    fn text_is_taken_apart() {
        let (variables, entries) = parse(TEXT).expect("it is PTX");
        let sizes: Vec<_> = variables.iter().map(|it| (it.name, it.space, it.align, it.bytes, it.init.len())).collect();
        let expected =
            [("words", ".shared", 16, 64, 0), ("tiles", ".shared", 128, 0, 0), ("table", ".global", 4, 4, 3)];
        assert_eq!(sizes, expected);
        let [entry] = &entries[..] else { panic!("one entry: {entries:?}") };
        assert_eq!((entry.name, entry.most_threads), ("double", Some(64)));
        assert_eq!(entry.params, [("double_param_0", 8, 24), ("double_param_1", 4, 4)]);
        let instruction = |guard, opcode, operands| Statement::Instruction { guard, opcode, operands };
        let expected = [
            (16, Statement::Registers { kind: ".pred", name: "%p", n: Some(2) }),
            (17, Statement::Label("$L0")),
            (18, instruction(Some((false, "%p1")), "bra", vec![Operand::Name("$L0")])),
            (19, Statement::Open),
            (20, Statement::Registers { kind: ".pred", name: "over", n: None }),
            (21, Statement::Close),
            (
                22,
                instruction(
                    None,
                    "ld.v2.b32",
                    vec![Operand::Vector(vec![Operand::Name("%r1"), Operand::Nothing]), Operand::Address("%rd1", -8)],
                ),
            ),
            (23, instruction(None, "mov.b32", vec![Operand::Name("%r2"), Operand::Number(0x3f80_0000)])),
            (24, Statement::Targets("$T", vec!["$L0", "$L1"])),
            (27, instruction(None, "ret", vec![])),
        ];
        assert_eq!(entry.body, expected);
    }

    #[test]
    fn what_is_not_understood_is_named_with_its_line() {
        let broken = TEXT.replace("ret;", "ret");
        let error = parse(&broken).expect_err("a statement without an end");
        assert!(error.to_string().starts_with("line 27: "), "{error}");
        let error = parse(".version 8.6\n.func f() {}\n").expect_err("a function");
        assert_eq!(error.to_string(), "line 2: `.func` is not understood here");
    }
}
