//! What chat templates take from Python.
//!
//! Published templates are written for jinja2, whose values are Python's, and some lean on it where minijinja differs:
//! `none` cannot be iterated over, text and dictionaries are sequences too, `int` never fails, `tojson` has the
//! keywords of `json.dumps`, and texts have Python's methods. Positions are counted in characters.

use minijinja::value::{Kwargs, Rest, ValueKind, from_args};
use minijinja::{Environment, Error, ErrorKind, State, Value, escape_formatter, filters};
use minijinja_contrib::globals::{cycler, joiner};
use minijinja_contrib::pycompat;

/// Makes `environment` render as jinja2 does.
pub(super) fn add_to(environment: &mut Environment<'static>) {
    environment.set_unknown_method_callback(method);
    environment.set_formatter(|out, state, value| {
        check_depth(value)?;
        match written(value) {
            Some(text) => out.write_str(&text).map_err(Error::from),
            None => escape_formatter(out, state, value),
        }
    });
    environment.add_filter("string", |value: &Value| {
        check_depth(value)?;
        Ok::<_, Error>(written(value).unwrap_or_else(|| value.to_string()))
    });
    environment.add_filter("indent", of_widths(Value::from_function(filters::indent)));
    environment.add_filter("batch", of_widths(Value::from_function(filters::batch)));
    environment.add_filter("slice", of_widths(Value::from_function(filters::slice)));
    environment.add_filter("format", format);
    environment.add_test("iterable", is_iterable);
    environment.add_test("sequence", is_sequence);
    environment.add_filter("length", length);
    environment.add_filter("count", length);
    environment.add_filter("int", int);
    environment.add_filter("tojson", tojson);
    environment.add_function("cycler", |items: Rest<Value>| cycler(items.0));
    environment.add_function("joiner", joiner);
}

fn wrong(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

fn is_iterable(value: &Value) -> bool {
    value.kind() != ValueKind::None && value.try_iter().is_ok()
}

/// Whether it has a length and elements by index or key. An undefined value counts as empty.
fn is_sequence(value: &Value) -> bool {
    matches!(
        value.kind(),
        ValueKind::Seq | ValueKind::Map | ValueKind::String | ValueKind::Bytes | ValueKind::Undefined
    )
}

fn length(value: &Value) -> Result<usize, Error> {
    if value.is_undefined() {
        return Ok(0);
    }
    value.len().ok_or_else(|| wrong(format!("cannot calculate length of value of type {}", value.kind())))
}

/// The number, or `default` (0) of what is none.
fn int(value: &Value, default: Option<Value>, base: Option<u32>, kwargs: Kwargs) -> Result<Value, Error> {
    let default = default.or(kwargs.get("default")?).unwrap_or_else(|| Value::from(0));
    let base = base.or(kwargs.get("base")?).unwrap_or(10);
    kwargs.assert_all_used()?;
    if !(2..=36).contains(&base) {
        return Err(wrong(format!("int(base={base}): expected 2 to 36")));
    }
    let of_float = |number: f64| if number.is_finite() { Value::from(number as i128) } else { default.clone() };
    Ok(match value.kind() {
        ValueKind::Undefined => return Err(Error::new(ErrorKind::UndefinedError, "int of an undefined value")),
        ValueKind::Bool => Value::from(i64::from(value.is_true())),
        ValueKind::Number if value.is_integer() => value.clone(),
        ValueKind::Number => f64::try_from(value.clone()).map_or(default.clone(), of_float),
        ValueKind::String => {
            let text = value.as_str().unwrap_or_default().trim();
            let digits = match base {
                16 => text.trim_start_matches("0x").trim_start_matches("0X"),
                8 => text.trim_start_matches("0o").trim_start_matches("0O"),
                2 => text.trim_start_matches("0b").trim_start_matches("0B"),
                _ => text,
            };
            match (i128::from_str_radix(digits, base), text.parse::<f64>()) {
                (Ok(number), _) => Value::from(number),
                (_, Ok(number)) => of_float(number),
                _ => default,
            }
        }
        _ => default,
    })
}

/// A value as Python's `str` writes it, where minijinja writes it otherwise.
fn written(value: &Value) -> Option<String> {
    let is_float = value.kind() == ValueKind::Number && !value.is_integer();
    if !is_float && !matches!(value.kind(), ValueKind::Seq | ValueKind::Map) {
        return None;
    }
    let mut out = String::new();
    repr(value, &mut out).ok()?;
    Some(out)
}

/// A value as Python's `repr` writes it.
fn repr(value: &Value, out: &mut String) -> Result<(), Error> {
    match value.kind() {
        ValueKind::Seq => {
            out.push('[');
            for (i, item) in value.try_iter()?.enumerate() {
                out.push_str(if i == 0 { "" } else { ", " });
                repr(&item, out)?;
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (i, key) in value.try_iter()?.enumerate() {
                out.push_str(if i == 0 { "" } else { ", " });
                repr(&key, out)?;
                out.push_str(": ");
                repr(&value.get_item(&key)?, out)?;
            }
            out.push('}');
        }
        ValueKind::String => {
            let text = value.as_str().unwrap_or_default();
            let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
            out.push(quote);
            for c in text.chars() {
                match c {
                    '\n' => out.push_str("\\n"),
                    '\r' => out.push_str("\\r"),
                    '\t' => out.push_str("\\t"),
                    c if c == quote || c == '\\' => out.extend(['\\', c]),
                    c if c.is_control() => out.push_str(&format!("\\x{:02x}", u32::from(c))),
                    c => out.push(c),
                }
            }
            out.push(quote);
        }
        ValueKind::Number if !value.is_integer() => {
            out.push_str(&f64::try_from(value.clone()).map_or_else(|_| value.to_string(), float));
        }
        _ => out.push_str(&value.to_string()),
    }
    Ok(())
}

/// How `json.dumps` writes.
struct Json {
    ensure_ascii: bool,
    /// What a line begins with, once for each level; `None`: all in one line.
    indent: Option<String>,
    comma: String,
    colon: String,
    sort_keys: bool,
}

/// `json.dumps(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
fn tojson(value: Value, args: Rest<Value>) -> Result<String, Error> {
    let (positional, kwargs): (&[Value], Kwargs) = from_args(&args)?;
    let given = |place: usize, keyword| {
        let keyword = kwargs.get::<Option<Value>>(keyword)?;
        Ok::<_, Error>(positional.get(place).cloned().or(keyword).filter(|value| !value.is_none()))
    };
    if positional.len() > 4 {
        return Err(Error::from(ErrorKind::TooManyArguments));
    }
    let ensure_ascii = given(0, "ensure_ascii")?.is_some_and(|flag| flag.is_true());
    let indent = match given(1, "indent")? {
        None => None,
        Some(text) if text.as_str().is_some() => text.as_str().map(str::to_owned),
        Some(width) => {
            let width = i64::try_from(width).map_err(|_| wrong("tojson: indent: expected a number"))?;
            // Python breaks lines, and indents by nothing, where it is negative.
            let width = usize::try_from(width).unwrap_or(0);
            Some(" ".repeat(check_width(width)?))
        }
    };
    let (comma, colon) = match given(2, "separators")? {
        // With an indent Python ends the line with a bare comma.
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
        Some(pair) => {
            let texts = pair.try_iter().map(|items| items.map(|item| item.as_str().map(str::to_owned)).collect());
            match texts.map(|texts: Vec<Option<String>>| <[Option<String>; 2]>::try_from(texts)) {
                Ok(Ok([Some(comma), Some(colon)])) => (comma, colon),
                _ => return Err(wrong("tojson: separators: expected two texts")),
            }
        }
    };
    let sort_keys = given(3, "sort_keys")?.is_some_and(|flag| flag.is_true());
    // Anything else changes how the text looks, so silence would be a wrong prompt.
    kwargs.assert_all_used()?;
    if value.is_undefined() {
        return Err(Error::new(ErrorKind::UndefinedError, "tojson of an undefined value"));
    }
    check_depth(&value)?;
    let value =
        serde_json::to_value(&value).map_err(|e| Error::new(ErrorKind::BadSerialization, format!("tojson: {e}")))?;
    let mut out = String::new();
    Json { ensure_ascii, indent, comma, colon, sort_keys }.write(&value, 0, &mut out);
    Ok(out)
}

impl Json {
    fn write(&self, value: &serde_json::Value, depth: usize, out: &mut String) {
        let newline = |depth: usize, out: &mut String| {
            if let Some(indent) = &self.indent {
                out.push('\n');
                out.extend(std::iter::repeat_n(indent.as_str(), depth));
            }
        };
        match value {
            serde_json::Value::Array(items) if !items.is_empty() => {
                out.push('[');
                for (i, item) in items.iter().enumerate() {
                    out.push_str(if i == 0 { "" } else { &self.comma });
                    newline(depth + 1, out);
                    self.write(item, depth + 1, out);
                }
                newline(depth, out);
                out.push(']');
            }
            serde_json::Value::Object(map) if !map.is_empty() => {
                out.push('{');
                let mut entries: Vec<_> = map.iter().collect();
                if self.sort_keys {
                    entries.sort_unstable_by_key(|(key, _)| *key);
                }
                for (i, (key, item)) in entries.into_iter().enumerate() {
                    out.push_str(if i == 0 { "" } else { &self.comma });
                    newline(depth + 1, out);
                    self.write_text(key, out);
                    out.push_str(&self.colon);
                    self.write(item, depth + 1, out);
                }
                newline(depth, out);
                out.push('}');
            }
            serde_json::Value::String(text) => self.write_text(text, out),
            serde_json::Value::Number(number) if number.is_f64() => {
                out.push_str(&float(number.as_f64().unwrap_or_default()));
            }
            plain => out.push_str(&plain.to_string()),
        }
    }

    fn write_text(&self, text: &str, out: &mut String) {
        let quoted = serde_json::Value::from(text).to_string();
        for c in quoted.chars() {
            if self.ensure_ascii && !(' '..='~').contains(&c) {
                let mut units = [0; 2];
                out.extend(c.encode_utf16(&mut units).iter().map(|unit| format!("\\u{unit:04x}")));
            } else {
                out.push(c);
            }
        }
    }
}

/// As Python writes it: with an exponent of at least two digits where it is below 1e-4 or from 1e16 on.
fn float(number: f64) -> String {
    if !number.is_finite() {
        return if number.is_nan() { "nan" } else { ["inf", "-inf"][usize::from(number < 0.0)] }.to_owned();
    }
    if number == 0.0 || (1e-4..1e16).contains(&number.abs()) {
        return format!("{number:?}");
    }
    let text = format!("{number:e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |exponent| ('-', exponent));
    format!("{digits}e{sign}{exponent:0>2}")
}

/// Methods that minijinja does not know.
fn method(state: &State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let result = match (value.as_str(), value.kind()) {
        (Some(text), _) => text_method(text, name, args),
        (None, ValueKind::Seq) if name == "index" => {
            let (wanted,): (&Value,) = from_args(args)?;
            let found = value.try_iter()?.position(|item| item == *wanted);
            return found.map(Value::from).ok_or_else(|| wrong(format!("{wanted:?} is not in list")));
        }
        _ => Ok(None),
    };
    match result? {
        Some(value) => Ok(value),
        None => pycompat::unknown_method_callback(state, value, name, args),
    }
}

/// What a method of Python's gives of `text`; `None` where it is none of those here.
fn text_method(text: &str, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let chars_before = |bytes: usize| Value::from(text[..bytes].chars().count());
    // Python says no of an empty text.
    let all = |is: fn(char) -> bool| {
        let () = from_args(args)?;
        Ok::<_, Error>(Value::from(!text.is_empty() && text.chars().all(is)))
    };
    // Of those that have a case, of which there must be one.
    let cased = |is: fn(char) -> bool| {
        let () = from_args(args)?;
        let mut letters = text.chars().filter(|c| c.is_lowercase() || c.is_uppercase()).peekable();
        Ok::<_, Error>(Value::from(letters.peek().is_some() && letters.all(is)))
    };
    Ok(Some(match name {
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Value::from(text.strip_prefix(prefix).unwrap_or(text))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Value::from(text.strip_suffix(suffix).unwrap_or(text))
        }
        "split" | "rsplit" => split(text, name == "rsplit", args)?,
        "partition" | "rpartition" => {
            let (separator,): (&str,) = from_args(args)?;
            if separator.is_empty() {
                return Err(wrong(format!("{name}: empty separator")));
            }
            Value::from(
                match name {
                    "partition" => match text.split_once(separator) {
                        Some((before, after)) => [before, separator, after],
                        None => [text, "", ""],
                    },
                    _ => match text.rsplit_once(separator) {
                        Some((before, after)) => [before, separator, after],
                        None => ["", "", text],
                    },
                }
                .map(Value::from)
                .to_vec(),
            )
        }
        "find" | "rfind" | "index" | "rindex" => {
            let (wanted,): (&str,) = from_args(args)?;
            let found = if name.starts_with('r') { text.rfind(wanted) } else { text.find(wanted) };
            match found {
                Some(position) => chars_before(position),
                None if name.ends_with("find") => Value::from(-1),
                None => return Err(wrong("substring not found")),
            }
        }
        "count" => {
            let (wanted,): (&str,) = from_args(args)?;
            Value::from(text.matches(wanted).count())
        }
        "isspace" => all(char::is_whitespace)?,
        "isdigit" | "isnumeric" => all(char::is_numeric)?,
        "isalnum" => all(char::is_alphanumeric)?,
        "isalpha" => all(char::is_alphabetic)?,
        "islower" => cased(char::is_lowercase)?,
        "isupper" => cased(char::is_uppercase)?,
        "swapcase" => {
            let () = from_args(args)?;
            let swapped = |c: char| match c.is_uppercase() {
                true => c.to_lowercase().collect::<String>(),
                false => c.to_uppercase().collect(),
            };
            Value::from(text.chars().map(swapped).collect::<String>())
        }
        "zfill" => {
            let (width,): (usize,) = from_args(args)?;
            let digits = text.strip_prefix(['-', '+']).unwrap_or(text);
            let zeros = "0".repeat(lacking(text, width)?);
            Value::from(format!("{}{zeros}{digits}", &text[..text.len() - digits.len()]))
        }
        "ljust" | "rjust" => {
            let (width, fill): (usize, Option<char>) = from_args(args)?;
            let filling: String = std::iter::repeat_n(fill.unwrap_or(' '), lacking(text, width)?).collect();
            Value::from(if name == "ljust" { format!("{text}{filling}") } else { format!("{filling}{text}") })
        }
        _ => return Ok(None),
    }))
}

/// How many characters `text` is short of `width`.
fn lacking(text: &str, width: usize) -> Result<usize, Error> {
    Ok(check_width(width)?.saturating_sub(text.chars().count()))
}

/// Whether `width` is one that a text, or an indentation, may have: one of billions would fill the memory of who reads
/// the template, which ends the program.
fn check_width(width: usize) -> Result<usize, Error> {
    const MOST: usize = 1 << 16;
    if width > MOST {
        return Err(wrong(format!("a width of {width}: expected at most {MOST}")));
    }
    Ok(width)
}

/// Whether `value` is nested no deeper than what may be written: that goes by recursion. JSON that can be read has 128
/// levels.
fn check_depth(value: &Value) -> Result<(), Error> {
    const MOST: usize = 200;
    fn check(value: &Value, left: usize) -> Result<(), Error> {
        if !matches!(value.kind(), ValueKind::Seq | ValueKind::Map) {
            return Ok(());
        }
        let left = left.checked_sub(1).ok_or_else(|| wrong(format!("values are nested more than {MOST} deep")))?;
        let is_map = value.kind() == ValueKind::Map;
        value.try_iter()?.try_for_each(|item| check(&if is_map { value.get_item(&item)? } else { item }, left))
    }
    check(value, MOST)
}

/// `filter`, of whose arguments behind the first those that are numbers are widths.
fn of_widths(filter: Value) -> impl Fn(&State, Rest<Value>) -> Result<Value, Error> + Send + Sync + 'static {
    move |state, args| {
        for arg in args.iter().skip(1) {
            let named = Kwargs::try_from(arg.clone()).ok();
            let named = named.and_then(|named| named.get::<Option<usize>>("width").ok().flatten());
            check_width(arg.as_usize().or(named).unwrap_or(0))?;
        }
        filter.call(state, &args)
    }
}

/// `format`, whose text may ask for widths.
fn format(state: &State, args: Rest<Value>) -> Result<Value, Error> {
    let text = args.first().and_then(Value::as_str).unwrap_or_default();
    for digits in text.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty()) {
        check_width(digits.parse().unwrap_or(usize::MAX))?;
    }
    // One that is an argument: which of them is not looked at.
    if text.contains('*') {
        of_widths(Value::from_function(filters::format))(state, args)
    } else {
        Value::from_function(filters::format).call(state, &args)
    }
}

/// `split(sep=None, maxsplit=-1)`, from the end where `from_end`.
fn split(text: &str, from_end: bool, args: &[Value]) -> Result<Value, Error> {
    let (separator, most, kwargs): (Option<&str>, Option<i64>, Kwargs) = from_args(args)?;
    let separator = separator.or(kwargs.get("sep")?);
    let most = most.or(kwargs.get("maxsplit")?).unwrap_or(-1);
    kwargs.assert_all_used()?;
    let most = usize::try_from(most).unwrap_or(usize::MAX);
    let parts: Vec<&str> = match (separator, from_end) {
        (Some(""), _) => return Err(wrong("split: empty separator")),
        (Some(separator), false) => text.splitn(most.saturating_add(1), separator).collect(),
        (Some(separator), true) => text.rsplitn(most.saturating_add(1), separator).collect(),
        // Runs of blanks, of which those at both ends separate nothing.
        (None, _) => {
            let (mut parts, mut rest) = (Vec::new(), if from_end { text.trim_end() } else { text.trim_start() });
            while !rest.is_empty() {
                let cut =
                    if from_end { rest.rsplit_once(char::is_whitespace) } else { rest.split_once(char::is_whitespace) };
                let (part, after) = match cut {
                    Some(_) if parts.len() == most => (rest, ""),
                    Some((before, part)) if from_end => (part, before.trim_end()),
                    Some((part, after)) => (part, after.trim_start()),
                    None => (rest, ""),
                };
                parts.push(part);
                rest = after;
            }
            parts
        }
    };
    let parts = parts.into_iter().map(Value::from);
    Ok(if from_end { parts.rev().collect() } else { parts.collect() })
}
