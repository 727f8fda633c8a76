//! What keeps a chat template from filling the memory of who reads it, or from overflowing their stack.
//!
//! A template is its publisher's word. minijinja counts its instructions (fuel), but one instruction may double a text, or write a number with a
//! width of billions, and memory that the system does not give ends the program. So whatever makes a text or a list of others is
//! charged for it, mostly before it does, and of what a rendering is charged for there is so much in all: [`MOST_BYTES`]. Operators have
//! no hook, so a template's instructions are run with functions of these names in their places ([`charged`]). What is nested is
//! built an instruction a level, compared and dropped by recursion: on a stack with room for as many ([`STACK_BYTES`]); what is
//! written is no deeper than [`MOST_DEPTH`].

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use minijinja::machinery::{CompiledTemplate, Instruction, Instructions};
use minijinja::value::{Kwargs, Object, Rest, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, Value, context, filters, functions};

use super::python::wrong;

/// Instructions a template may take to render: it must not hang who reads it, either. Published templates take 30 to 100 a message; one that
/// looks for each tool's call in the whole conversation (Command R7B) 600 where there are 200 of them, half with tools.
pub(super) const FUEL: u64 = 2_000_000;
/// Bytes of all texts and lists that a rendering may make: hundreds of times a conversation that fills a large context.
const MOST_BYTES: usize = 256 << 20;
/// Levels of what is written. JSON that can be read has 128.
const MOST_DEPTH: usize = 200;
/// The largest width, number of columns or of lists.
const MOST_WIDTH: usize = 1 << 16;
/// Of the thread that renders: what [`FUEL`] can nest is dropped there, with 256 bytes for each level. It takes memory where it is used.
pub(super) const STACK_BYTES: usize = 512 << 20;

/// Bytes for an element of a list.
const ELEMENT_BYTES: usize = size_of::<Value>();

/// What a rendering may still make.
#[derive(Debug)]
struct Budget(AtomicUsize);

impl Object for Budget {}

/// Takes `bytes` from what the rendering of `state` may make.
pub(super) fn charge(state: &State, bytes: usize) -> Result<(), Error> {
    let budget = state.get_or_set_temp_object("perpetua.budget", || Budget(AtomicUsize::new(MOST_BYTES)));
    let taken = budget.0.try_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(bytes));
    taken.map(drop).map_err(|_| wrong(format!("it makes more than {} MiB of text", MOST_BYTES >> 20)))
}

/// What a value takes where all of it is written, or copied.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Weight {
    /// Of texts, and some for each value.
    pub(super) bytes: usize,
    /// Values in it, and in those.
    pub(super) items: usize,
    /// Levels.
    pub(super) depth: usize,
}

/// How much there is of `value` to write.
///
/// # Errors
/// Too much, or too deep.
pub(super) fn weigh(value: &Value) -> Result<Weight, Error> {
    let mut weight = Weight::default();
    add_weight(value, 1, &mut weight)?;
    Ok(weight)
}

fn add_weight(value: &Value, depth: usize, weight: &mut Weight) -> Result<(), Error> {
    if depth > MOST_DEPTH {
        return Err(wrong(format!("values are nested more than {MOST_DEPTH} deep")));
    }
    weight.depth = weight.depth.max(depth);
    weight.items += 1;
    // Something for each, so that what is looked at is bounded, too.
    weight.bytes = weight.bytes.saturating_add(ELEMENT_BYTES + value.as_str().map_or(0, str::len));
    if weight.bytes > MOST_BYTES {
        return Err(wrong(format!("a value has more than {} MiB of text", MOST_BYTES >> 20)));
    }
    if matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable | ValueKind::Map) {
        let is_map = value.kind() == ValueKind::Map;
        for item in value.try_iter()? {
            add_weight(&item, depth + 1, weight)?;
            if is_map {
                add_weight(&value.get_item(&item)?, depth + 1, weight)?;
            }
        }
    }
    Ok(())
}

/// Whether `width` is one that a text, or a list of lists, may have.
pub(super) fn check_width(width: usize) -> Result<usize, Error> {
    match width <= MOST_WIDTH {
        true => Ok(width),
        false => Err(wrong(format!("a width of {width}: expected at most {MOST_WIDTH}"))),
    }
}

/// Bytes of `value` without what is in it.
fn size(value: &Value) -> usize {
    value.as_str().map_or_else(|| value.len().unwrap_or(0).saturating_mul(ELEMENT_BYTES), str::len)
}

/// What was made, paid for.
pub(super) fn paid(state: &State, made: Value) -> Result<Value, Error> {
    charge(state, size(&made))?;
    Ok(made)
}

/// A list with a length: that of `value`, or what comes out of it.
fn with_length(state: &State, value: &Value) -> Result<Value, Error> {
    if value.len().is_some() {
        return Ok(value.clone());
    }
    let items = value.try_iter()?.map(|item| charge(state, ELEMENT_BYTES).map(|()| item));
    Ok(Value::from(items.collect::<Result<Vec<_>, _>>()?))
}

/// What `filter` gives of its arguments, paid for; with `of_all`, they are written, with whatever is in them, and paid for first.
fn wrap(environment: &mut Environment<'static>, name: &'static str, filter: Value, of_all: bool) {
    environment.add_filter(name, move |state: &State, args: Rest<Value>| {
        if of_all {
            for arg in args.iter() {
                let Weight { bytes, items, depth } = weigh(arg)?;
                // A line for each, further in at each level, is what `pprint` makes.
                charge(state, bytes.saturating_add(items * depth * 4))?;
            }
        }
        paid(state, filter.call(state, &args)?)
    });
}

/// Charges the filters and functions of `environment` that make texts and lists; and adds those that stand for operators.
pub(super) fn add_to(environment: &mut Environment<'static>) {
    macro_rules! wrap {
        ($of_all:literal: $($name:literal $filter:ident),*) => {
            $(wrap(environment, $name, Value::from_function(filters::$filter), $of_all);)*
        };
    }
    wrap!(true: "upper" upper, "lower" lower, "title" title, "capitalize" capitalize, "trim" trim, "pprint" pprint, "split" split,
        "lines" lines, "escape" escape, "e" escape);
    wrap!(false: "list" list, "sort" sort, "dictsort" dictsort, "items" items, "reverse" reverse, "unique" unique, "groupby" groupby,
        "map" map, "select" select, "reject" reject, "selectattr" selectattr, "rejectattr" rejectattr);
    environment.add_filter("replace", |state: &State, args: Rest<Value>| {
        charge_replacing(state, &args)?;
        Value::from_function(filters::replace).call(state, &args)
    });
    environment.add_filter("join", |state: &State, args: Rest<Value>| {
        charge_joining(state, args.first(), args.get(1))?;
        Value::from_function(filters::join).call(state, &args)
    });
    environment.add_filter("format", |state: &State, args: Rest<Value>| {
        charge_format(state, args.first(), args.get(1..).unwrap_or_default())?;
        Value::from_function(filters::format).call(state, &args)
    });
    environment.add_filter("indent", |state: &State, args: Rest<Value>| {
        let (text, rest) = args.split_first().ok_or_else(|| Error::from(ErrorKind::MissingArgument))?;
        let named = rest.last().and_then(|last| Kwargs::try_from(last.clone()).ok());
        let named = named.and_then(|named| named.get::<Option<usize>>("width").ok().flatten());
        let width = check_width(rest.first().and_then(Value::as_usize).or(named).unwrap_or(4))?;
        let lines = 1 + text.as_str().map_or(0, |text| text.matches('\n').count());
        charge(state, weigh(text)?.bytes.saturating_add(lines * width))?;
        Value::from_function(filters::indent).call(state, &args)
    });
    for (name, filter) in
        [("batch", Value::from_function(filters::batch)), ("slice", Value::from_function(filters::slice))]
    {
        environment.add_filter(name, move |state: &State, args: Rest<Value>| {
            let columns = check_width(args.get(1).and_then(Value::as_usize).unwrap_or(1))?;
            charge(state, args.first().map_or(0, size).saturating_add(columns * ELEMENT_BYTES))?;
            filter.call(state, &args)
        });
    }
    for (name, filter) in [("chain", Value::from_function(filters::chain)), ("zip", Value::from_function(filters::zip))]
    {
        environment.add_filter(name, move |state: &State, args: Rest<Value>| {
            let made = filter.call(state, &args)?;
            // Lazy, it would be nothing, and twice as much each time.
            paid(state, with_length(state, &made)?)
        });
    }
    environment.add_function("dict", |state: &State, args: Rest<Value>| {
        paid(state, Value::from_function(functions::dict).call(state, &args)?)
    });
    // Not of jinja2, and they write whatever they are given.
    environment.remove_global("debug");
    ["startingwith", "endingwith"].into_iter().for_each(|test| environment.remove_test(test));

    environment.add_function(ADD, add);
    environment.add_function(MULTIPLY, multiply);
    environment.add_function(CONCAT, concat);
    environment.add_function(IN, contains);
    environment.add_test("in", |state: &State, value: Value, container: Value| contains(state, value, container));
    environment.add_function(SLICE, |state: &State, value: Value, start: Value, stop: Value, step: Value| {
        let sliced = evaluate("a[b:c:d]", context! {a => value, b => start, c => stop, d => step})?;
        paid(state, sliced)
    });
}

/// Pays for `text.replace(old, new)`.
pub(super) fn charge_replacing(state: &State, args: &[Value]) -> Result<(), Error> {
    let mut bytes = 0;
    for arg in args {
        bytes = weigh(arg)?.bytes.saturating_add(bytes);
    }
    if let [text, old, new, ..] = args
        && let (Some(text), Some(old)) = (text.as_str(), old.as_str())
    {
        let times = if old.is_empty() { text.len() + 1 } else { text.matches(old).count() };
        bytes = bytes.saturating_add(times.saturating_mul(weigh(new)?.bytes));
    } else {
        // Numbers, say, as texts.
        bytes = bytes.saturating_mul(bytes);
    }
    charge(state, bytes)
}

/// Pays for `items` as one text, with `separator` between them.
pub(super) fn charge_joining(state: &State, items: Option<&Value>, separator: Option<&Value>) -> Result<(), Error> {
    let weight = items.map_or(Ok(Weight::default()), weigh)?;
    let between = separator.map_or(Ok(Weight::default()), weigh)?.bytes;
    // Of a text the characters are joined.
    let items = items.and_then(Value::as_str).map_or(weight.items, str::len);
    charge(state, weight.bytes.saturating_add(items.saturating_mul(between)))
}

/// Pays for what `format` makes of `args`, as `%` or as `str.format` does.
pub(super) fn charge_format(state: &State, format: Option<&Value>, args: &[Value]) -> Result<(), Error> {
    let Some(format) = format.and_then(Value::as_str) else { return Ok(()) };
    let (mut largest, mut bytes) = (0, format.len());
    for arg in args {
        largest = largest.max(weigh(arg)?.bytes);
    }
    for spec in format.split(['%', '{']).skip(1) {
        // Width and precision, of which an argument may be one.
        let end = spec.find(|c: char| c == '}' || c.is_ascii_alphabetic()).unwrap_or(spec.len());
        for digits in spec[..end].split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty()) {
            bytes = bytes.saturating_add(check_width(digits.parse().unwrap_or(usize::MAX))?);
        }
        if spec[..end].contains('*') || format.contains(":{") {
            for width in args.iter().filter_map(Value::as_usize) {
                bytes = bytes.saturating_add(check_width(width)?);
            }
        }
        bytes = bytes.saturating_add(largest);
    }
    charge(state, bytes)
}

const ADD: &str = "+";
const MULTIPLY: &str = "*";
const CONCAT: &str = "~";
const IN: &str = "in";
const SLICE: &str = "[:]";
/// Bytes between two tags that are printed for nothing but an instruction.
const LONG: usize = 256;

/// What minijinja makes of `expression`.
fn evaluate(expression: &str, context: Value) -> Result<Value, Error> {
    let evaluated = Environment::empty().compile_expression(expression)?.eval(context);
    // Where that was is for the template's instruction to say.
    evaluated.map_err(|e| e.detail().map_or_else(|| e.kind().into(), |detail| Error::new(e.kind(), detail.to_owned())))
}

fn is_list(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable)
}

fn add(state: &State, a: Value, b: Value) -> Result<Value, Error> {
    if let (Some(a), Some(b)) = (a.as_str(), b.as_str()) {
        charge(state, a.len() + b.len())?;
        return Ok(Value::from([a, b].concat()));
    }
    if !is_list(&a) || !is_list(&b) {
        return evaluate("a + b", context! {a, b});
    }
    let (a, b) = (with_length(state, &a)?, with_length(state, &b)?);
    // Lazy most of the time: a byte an element, for the walk that it will be.
    charge(state, a.len().unwrap_or(0).saturating_add(b.len().unwrap_or(0)))?;
    evaluate("a + b", context! {a, b})
}

fn multiply(state: &State, a: Value, b: Value) -> Result<Value, Error> {
    let is_many = |value: &Value| is_list(value) || value.as_str().is_some();
    if !is_many(&a) && !is_many(&b) {
        return evaluate("a * b", context! {a, b});
    }
    let (many, times) = if is_many(&a) { (&a, &b) } else { (&b, &a) };
    let many = if is_list(many) { with_length(state, many)? } else { many.clone() };
    charge(state, size(&many).saturating_mul(times.as_usize().unwrap_or(0)))?;
    evaluate("a * b", context! {a => many, b => times})
}

fn concat(state: &State, a: Value, b: Value) -> Result<Value, Error> {
    charge(state, weigh(&a)?.bytes.saturating_add(weigh(&b)?.bytes))?;
    Ok(Value::from(format!("{a}{b}")))
}

fn contains(state: &State, a: Value, b: Value) -> Result<Value, Error> {
    // What is looked for in a text is written as one.
    if b.as_str().is_some() && a.as_str().is_none() {
        charge(state, weigh(&a)?.bytes)?;
    }
    evaluate("a in b", context! {a, b})
}

/// A template's instructions, and its blocks', with functions for the operators that make texts and lists.
pub(super) struct Charged<'s> {
    pub(super) instructions: Instructions<'s>,
    pub(super) blocks: BTreeMap<&'s str, Instructions<'s>>,
}

pub(super) fn charged<'s>(template: &CompiledTemplate<'s>) -> Charged<'s> {
    let blocks = template.blocks.iter().map(|(name, block)| (*name, with_functions(block))).collect();
    Charged { instructions: with_functions(&template.instructions), blocks }
}

fn with_functions<'s>(of: &Instructions<'s>) -> Instructions<'s> {
    let all: Vec<_> = (0..of.len() as u32).filter_map(|at| of.get(at)).collect();
    let is_long =
        |instruction: &Instruction<'_>| matches!(instruction, Instruction::EmitRaw(text) if text.len() > LONG);
    // Where each is, behind those that have become two.
    let before =
        all.iter().scan(0, |n, instruction| Some(std::mem::replace(n, *n + 1 + u32::from(is_long(instruction)))));
    let mut places: Vec<u32> = before.collect();
    places.push(places.last().zip(all.last()).map_or(0, |(at, last)| at + 1 + u32::from(is_long(last))));
    let to = |at: &u32| places[*at as usize];
    let mut charged = Instructions::new(of.name(), of.source());
    for (at, instruction) in (0..).zip(all) {
        let line = of.get_line(at).unwrap_or(0).try_into().unwrap_or(u16::MAX);
        let instead = match instruction {
            Instruction::Add => Instruction::CallFunction(ADD, Some(2)),
            Instruction::Mul => Instruction::CallFunction(MULTIPLY, Some(2)),
            Instruction::StringConcat => Instruction::CallFunction(CONCAT, Some(2)),
            Instruction::In => Instruction::CallFunction(IN, Some(2)),
            Instruction::Slice => Instruction::CallFunction(SLICE, Some(4)),
            Instruction::EmitRaw(text) if text.len() > LONG => {
                charged.add_with_line(Instruction::LoadConst(Value::from(*text)), line);
                Instruction::Emit
            }
            Instruction::Iterate(target) => Instruction::Iterate(to(target)),
            Instruction::Jump(target) => Instruction::Jump(to(target)),
            Instruction::JumpIfFalse(target) => Instruction::JumpIfFalse(to(target)),
            Instruction::JumpIfFalseOrPop(target) => Instruction::JumpIfFalseOrPop(to(target)),
            Instruction::JumpIfTrueOrPop(target) => Instruction::JumpIfTrueOrPop(to(target)),
            Instruction::BuildMacro(name, target, flags) => Instruction::BuildMacro(name, to(target), *flags),
            other => other.clone(),
        };
        charged.add_with_line(instead, line);
    }
    charged
}
