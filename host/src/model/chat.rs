//! Chat templates: messages to the text a model was trained to answer.
//!
//! The template is Jinja, in chat_template.jinja or in tokenizer_config.json, and is rendered as the library that
//! models are published with renders it: blocks trimmed, what templates take from Python ([`python`]),
//! `raise_exception`, `strftime_now`, and every special token as a variable.

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::{Environment, Error, ErrorKind, UndefinedBehavior, Value};
use serde::ser::{Serialize, SerializeMap, Serializer};

use super::declared::Declared;
use super::error::ModelError;
use super::json::{Fields, read_bytes, read_value};
use super::python;

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatMessage {
    /// `system`, `user` or `assistant`.
    pub role: String,
    /// What was said.
    pub content: String,
    /// What an assistant said to itself before it answered, if it did: templates have a place for it, or leave it out.
    /// See [`ReasoningParser`](super::reasoning::ReasoningParser).
    pub reasoning: Option<String>,
}

impl ChatMessage {
    /// A message of the given role.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> ChatMessage {
        ChatMessage { role: role.into(), content: content.into(), reasoning: None }
    }
}

impl Serialize for ChatMessage {
    /// As templates take it, who have two names for the reasoning.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("role", &self.role)?;
        map.serialize_entry("content", &self.content)?;
        if let Some(reasoning) = &self.reasoning {
            map.serialize_entry("reasoning_content", reasoning)?;
            map.serialize_entry("thinking", reasoning)?;
        }
        map.end()
    }
}

/// A model's chat template, compiled.
#[derive(Debug)]
pub struct ChatTemplate {
    path: PathBuf,
    environment: Environment<'static>,
    /// `bos_token`, `eos_token` and the like.
    special_tokens: Vec<(String, String)>,
}

/// Larger than any real template.
const MAX_TEMPLATE_BYTES: u64 = 16 << 20;
const NAME: &str = "chat";
/// Instructions a template may take to render: a template is the model's author's word, and must not hang who reads it.
/// The largest of today's take a few hundred a message.
const FUEL: u64 = 2_000_000;

impl ChatTemplate {
    /// Reads a model folder's chat template.
    pub fn open(dir: &Path) -> Result<ChatTemplate, ModelError> {
        let config_path = dir.join("tokenizer_config.json");
        let config = if config_path.exists() { Some(read_value(&config_path)?) } else { None };
        let config = config.as_ref().map(|value| Fields::new(&config_path, value)).transpose()?;

        let file = dir.join("chat_template.jinja");
        let (path, source) = if file.exists() {
            let bytes = read_bytes(&file, MAX_TEMPLATE_BYTES)?;
            let source = String::from_utf8(bytes).map_err(|_| chat_error(&file, "not UTF-8 text"))?;
            (file, source)
        } else {
            let source = config.as_ref().map(template_of).transpose()?.flatten();
            (config_path.clone(), source.ok_or_else(|| ModelError::NoChatTemplate { dir: dir.to_owned() })?)
        };
        let named = Declared::open(dir)?.named;
        let special_tokens = named.into_iter().map(|(name, token)| (name, token.content)).collect();
        ChatTemplate::from_source(&path, &source, special_tokens)
    }

    /// Compiles a template; `path` is what errors call it.
    pub fn from_source(
        path: &Path,
        source: &str,
        special_tokens: Vec<(String, String)>,
    ) -> Result<ChatTemplate, ModelError> {
        let mut environment = Environment::new();
        environment.set_fuel(Some(FUEL));
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        python::add_to(&mut environment);
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, format!("{REFUSED}{message}")))
        });
        environment.add_function("strftime_now", |format: String| strftime(&format, unix_seconds()));
        environment
            .add_template_owned(NAME, without_generation_tags(source))
            .map_err(|e| chat_error(path, format!("chat template: {}", one_line(&e))))?;
        Ok(ChatTemplate { path: path.to_owned(), environment, special_tokens })
    }

    /// The prompt for the assistant's next turn.
    pub fn render(&self, messages: &[ChatMessage]) -> Result<String, ModelError> {
        self.render_with(messages, &[])
    }

    /// As [`ChatTemplate::render`], with variables of the template's own, such as `enable_thinking`.
    pub fn render_with(
        &self,
        messages: &[ChatMessage],
        variables: &[(&str, serde_json::Value)],
    ) -> Result<String, ModelError> {
        let mut context: Vec<(&str, Value)> = vec![
            ("messages", Value::from_serialize(messages)),
            ("add_generation_prompt", Value::from(true)),
            // Given as none rather than left out: templates ask `tools is not none`.
            ("tools", Value::from(())),
            ("documents", Value::from(())),
        ];
        context.extend(self.special_tokens.iter().map(|(k, v)| (k.as_str(), Value::from(v.as_str()))));
        context.extend(variables.iter().map(|(k, v)| (*k, Value::from_serialize(v))));
        let context: Value = context.into_iter().collect();
        let template = self.environment.get_template(NAME).map_err(|e| chat_error(&self.path, one_line(&e)))?;
        template.render(context).map_err(|e| {
            chat_error(
                &self.path,
                match e.detail().and_then(|d| d.strip_prefix(REFUSED)) {
                    Some(message) => format!("the chat template refuses these messages: {message}"),
                    None if e.kind() == ErrorKind::OutOfFuel => {
                        format!("chat template: not rendered after {FUEL} steps: it does not seem to end")
                    }
                    None => format!("chat template: {}", one_line(&e)),
                },
            )
        })
    }
}

/// Marks an error as the template's own words.
const REFUSED: &str = "refused: ";

fn chat_error(path: &Path, message: impl Into<String>) -> ModelError {
    ModelError::ChatTemplate { path: path.to_owned(), message: message.into() }
}

/// The error with its line, without the excerpt that may follow.
fn one_line(error: &Error) -> String {
    let text = error.to_string();
    let line = text.lines().next().unwrap_or_default();
    line.replace(&format!(" (in {NAME}:"), " (line ").trim().to_owned()
}

/// `chat_template`: a string, or a list of named ones of which `default` is meant.
fn template_of(config: &Fields<'_>) -> Result<Option<String>, ModelError> {
    let expected = "a string, or a list of {\"name\", \"template\"}";
    let value = match config.get("chat_template") {
        None => return Ok(None),
        Some(serde_json::Value::String(source)) => return Ok(Some(source.clone())),
        Some(value) => value,
    };
    let named = value.as_array().and_then(|list| {
        list.iter()
            .map(|entry| Some((entry.get("name")?.as_str()?, entry.get("template")?.as_str()?)))
            .collect::<Option<Vec<_>>>()
    });
    let named = named.ok_or_else(|| config.wrong("chat_template", expected))?;
    match named.iter().find(|(name, _)| *name == "default").or(if named.len() == 1 { named.first() } else { None }) {
        Some((_, source)) => Ok(Some((*source).to_owned())),
        None if named.is_empty() => Ok(None),
        None => {
            let names: Vec<_> = named.iter().map(|(name, _)| *name).collect();
            Err(ModelError::key(config.path(), "chat_template", names.join(", "), "one named \"default\""))
        }
    }
}

/// `{% generation %}` marks the assistant's words for training and changes nothing in the text.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(begin) = rest.find("{%") {
        let Some(length) = rest[begin..].find("%}") else { break };
        let tag = &rest[begin..begin + length + 2];
        let word = tag.trim_start_matches("{%").trim_end_matches("%}");
        let word = word.trim_matches(|c: char| c == '-' || c == '+' || c.is_whitespace());
        out.push_str(&rest[..begin]);
        match word {
            "generation" => out.push_str(&tag.replacen(word, "if true", 1)),
            "endgeneration" => out.push_str(&tag.replacen(word, "endif", 1)),
            _ => out.push_str(tag),
        }
        rest = &rest[begin + length + 2..];
    }
    out.push_str(rest);
    out
}

fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// The conversions of `strftime` that templates use, in UTC; an unknown one is left as it stands.
fn strftime(format: &str, unix_seconds: u64) -> String {
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
    let (days, seconds) = (unix_seconds / 86_400, unix_seconds % 86_400);
    let (year, month, day, day_of_year) = civil(days);
    let (month_name, day_name) = (MONTHS[month - 1], DAYS[(days % 7) as usize]);
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);

    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        match chars.next() {
            Some('Y') => out.push_str(&year.to_string()),
            Some('y') => out.push_str(&format!("{:02}", year % 100)),
            Some('m') => out.push_str(&format!("{month:02}")),
            Some('d') => out.push_str(&format!("{day:02}")),
            Some('e') => out.push_str(&format!("{day:2}")),
            Some('j') => out.push_str(&format!("{day_of_year:03}")),
            Some('B') => out.push_str(month_name),
            Some('b') => out.push_str(&month_name[..3]),
            Some('A') => out.push_str(day_name),
            Some('a') => out.push_str(&day_name[..3]),
            Some('H') => out.push_str(&format!("{hour:02}")),
            Some('I') => out.push_str(&format!("{:02}", (hour + 11) % 12 + 1)),
            Some('p') => out.push_str(if hour < 12 { "AM" } else { "PM" }),
            Some('M') => out.push_str(&format!("{minute:02}")),
            Some('S') => out.push_str(&format!("{second:02}")),
            Some('F') => out.push_str(&format!("{year}-{month:02}-{day:02}")),
            Some('T') => out.push_str(&format!("{hour:02}:{minute:02}:{second:02}")),
            Some('%') => out.push('%'),
            Some(other) => out.extend(['%', other]),
            None => out.push('%'),
        }
    }
    out
}

/// Year, month, day and day of the year, all from 1, of a day counted from 1 January 1970.
fn civil(mut days: u64) -> (u64, usize, u64, u64) {
    let leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    // 400 years have 146097 days; after that at most 400 steps remain.
    let mut year = 1970 + 400 * (days / 146_097);
    days %= 146_097;
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let day_of_year = days + 1;
    let lengths = [31, 28 + u64::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 0;
    while days >= lengths[month] {
        days -= lengths[month];
        month += 1;
    }
    (year, month + 1, days + 1, day_of_year)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::json;

    use super::*;

    fn template(source: &str) -> ChatTemplate {
        let tokens = vec![("bos_token".to_owned(), "<s>".to_owned()), ("eos_token".to_owned(), "</s>".to_owned())];
        ChatTemplate::from_source(Path::new("chat_template.jinja"), source, tokens).expect("a template")
    }

    fn turns() -> [ChatMessage; 3] {
        [
            ChatMessage::new("system", "Be brief."),
            ChatMessage::new("user", " Hi <b> "),
            ChatMessage::new("assistant", "Yes"),
        ]
    }

    #[test]
    fn a_fixture() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-qwen3");
        let template = ChatTemplate::open(&dir).expect("the fixture");
        let text = template.render(&[ChatMessage::new("user", "Hi <you> & me")]).expect("renders");
        assert_eq!(text, "<|im_start|>user\nHi <you> & me<|im_end|>\n<|im_start|>assistant\n");
    }

    #[test]
    fn a_template_without_end_is_refused() {
        let source = "{% for a in range(9999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}";
        let error = template(source).render(&turns()).expect_err("it would take minutes").to_string();
        assert!(error.contains("does not seem to end") && error.lines().count() == 1, "{error}");
        // A long conversation is no such thing.
        let long = vec![ChatMessage::new("user", "Hi"); 20_000];
        assert!(template("{% for m in messages %}{{ m.role }}{% endfor %}").render(&long).is_ok());
    }

    /// A width of billions, or what is nested without end, is refused by a line, and does not end the program.
    #[test]
    fn a_template_that_asks_for_too_much_is_refused() {
        let (wide, deep) = ("expected at most 65536", "nested more than 200 deep");
        let nested = |use_of: &str| {
            format!(
                "{{% set ns = namespace(x=[]) %}}{{% for i in range(300) %}}{{% set ns.x = [ns.x] %}}{{% endfor %}}{use_of}"
            )
        };
        for (source, why) in [
            ("{{ [1] | tojson(indent=9000000000) }}", wide),
            ("{{ 'a\nb' | indent(9000000000) }}", wide),
            ("{{ 'a\nb' | indent(width=9000000000) }}", wide),
            ("{{ '%9000000000d' | format(1) }}", wide),
            ("{{ '%.9000000000f' | format(1) }}", wide),
            ("{{ '%*d' | format(9000000000, 1) }}", wide),
            ("{{ [1] | batch(9000000000, 1) }}", wide),
            ("{{ [1] | slice(9000000000) }}", wide),
            ("{{ 'a'.ljust(9000000000) }}", wide),
            (&nested("{{ ns.x | tojson }}"), deep),
            (&nested("{{ ns.x }}"), deep),
            (&nested("{{ ns.x | string }}"), deep),
        ] {
            let error = template(source).render(&turns()).expect_err(source).to_string();
            assert!(error.contains(why) && error.lines().count() == 1, "{source}: {error}");
        }
        let text =
            template("{{ 'a\nb' | indent(2) }}{{ '%03d' | format(7) }}").render(&turns()).expect("of usual widths");
        assert_eq!(text, "a\n  b007");
    }

    /// What published templates use, each with the text that the reference engine makes of it.
    #[test]
    fn the_dialect_of_published_templates() {
        for (source, expected) in [
            (
                "{{ bos_token }}{% for m in messages %}{{ m.role }}|{% endfor %}{{ eos_token }}",
                "<s>system|user|assistant|</s>",
            ),
            // Blocks take their line with them.
            ("a\n    {% if true %}\n  b\n    {% endif %}\nc\n", "a\n  b\nc"),
            ("{%- for m in messages[::-1] %}{{ loop.index0 ~ m['role'][:2] }} {%- endfor %}", "0as1us2sy"),
            (
                "{%- set ns = namespace(n=0) %}{%- for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
                "2",
            ),
            ("{{ messages[1].content.strip() + '|' + messages[1]['content'] | trim | upper }}", "Hi <b>|HI <B>"),
            ("{{ 'a</think>\\n\\nb'.split('</think>')[-1].lstrip('\\n') }}", "b"),
            ("{{ 'x-y'.startswith('x') }} {{ messages[0].content is string }} {{ tools is none }}", "True True True"),
            ("{% if messages[0].role not in ['user'] and enable_thinking is not defined %}y{% endif %}", "y"),
            ("{{ messages[0] | tojson }}", r#"{"role": "system", "content": "Be brief."}"#),
            (
                "{{ {'b': [1, 2.5, true, none], 'a': {}} | tojson(indent=2) }}",
                "{\n  \"b\": [\n    1,\n    2.5,\n    true,\n    null\n  ],\n  \"a\": {}\n}",
            ),
            ("{{ messages[1].content | tojson }}", "\" Hi <b> \""),
            ("{%- macro f(x) -%}[{{ x }}]{%- endmacro -%}{{ f(messages | length) }}", "[3]"),
            ("{%- generation -%}x{%- endgeneration -%}{% generation %}\ny{% endgeneration %}\n", "xy"),
            ("{{ undefined_thing }}{{ messages[0].tool_calls }}|", "|"),
            (
                "{% set m = messages[0] %}{% if m.get('name') is none %}{% for k, v in m.items() %}{{ k }},{% endfor %}{% endif %}",
                "role,content,",
            ),
            ("{{ add_generation_prompt }}{# a comment #}", "True"),
            (
                "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ loop.index }}{% endif %}{% endfor %}",
                "123",
            ),
            ("{{ (messages | selectattr('role', 'equalto', 'user') | list)[0].content }}", " Hi <b> "),
            (
                "{{ messages | rejectattr('role', 'equalto', 'user') | map(attribute='role') | join(',') }}",
                "system,assistant",
            ),
            ("{% for k, v in messages[0] | items %}{{ k }}={{ v }};{% endfor %}", "role=system;content=Be brief.;"),
            (
                "{% for m in messages if m.role != 'system' %}{{ m.role }}{{ '' if loop.last else '+' }}{% endfor %}",
                "user+assistant",
            ),
            (
                "{% for m in messages %}{{ loop.previtem.role if loop.previtem is defined else '-' }}>{{ loop.nextitem.role if not loop.last else '.' }} {% endfor %}",
                "->user system>assistant user>. ",
            ),
            (
                "{% set c %}in {{ messages[0].role }}{% endset %}{{ c | replace('in', 'IN') }}{{ (messages | first).role }}{{ (messages | last).role }}",
                "IN systemsystemassistant",
            ),
            (
                "{{ messages[0] is mapping }}{{ messages is iterable }}{{ 'rie' in messages[0].content }}{{ messages is sequence }}{{ messages[0].content is not none }}",
                "TrueTrueTrueTrueTrue",
            ),
            ("{{ 'ab' * 2 }}{{ 7 // 2 }}{{ 7 % 2 }}{{ 2 ** 3 }}{{ 7 / 2 }}{{ [1] + [2, 3] }}", "abab3183.5[1, 2, 3]"),
            ("{% set messages = messages[1:] %}{{ messages | length }}{{ messages[-1]['role'] }}", "2assistant"),
            (
                "{{ messages[0].get('x', 'default') }}{{ messages[0]['x'] | default('d2') }}{{ {'role': 'x'} | tojson }}",
                "defaultd2{\"role\": \"x\"}",
            ),
            (
                "{{ 'A-b'.lower() ~ 'c'.upper() ~ 'x,y'.split(',') | length ~ ' t '.rstrip() ~ 'q'.endswith('q') ~ 'a b'.title() }}",
                "a-bC2 tTrueA B",
            ),
            ("{{ \"%s is %d\" | format('x', 3) }}{{ 'a\\nb' | indent(2) }}", "x is 3a\n  b"),
            (
                "{% if tools %}t{% elif not documents and true %}d{% else %}e{% endif %}{% if messages and messages[0]['role'] == 'system' %}s{% endif %}",
                "ds",
            ),
            ("{%- for i in range(3) -%}{%- if i == 2 %}{% break %}{% endif -%}{{ i }}{%- endfor %}", "01"),
            (
                "{% macro r(m, tag='x') %}<{{ tag }}>{{ m.role }}{% endmacro %}{{ r(messages[0]) }}{{ r(messages[1], tag='y') }}",
                "<x>system<y>user",
            ),
            (
                "{{ 'a' if messages[0].role == 'nobody' }}|{{ messages[0]['content'] | string | length }}{{ '12' | int + 1 }}",
                "|913",
            ),
            ("{%- set a, b = 1, 2 %}{{ a + b }}{% set x = {'k': [1, {'z': 2}]} %}{{ x.k[1].z }}{{ x['k'][0] }}", "321"),
            ("{% for m in messages -%}\n  {{ m.role }}\n{%- endfor %}\n\nend\n\n", "systemuserassistant\nend\n"),
            (
                "{{ '\\u00e9<>&\\'\"' | tojson }}{{ 'x'.join(['1','2']) }}{{ messages[0].content.find('brief') }}",
                "\"é<>&'\\\"\"1x23",
            ),
            ("{{ 'abc'[::-1] }}{{ 'abcdef'[1:-1] }}{{ messages[:-1] | length }}", "cbabcde2"),
            (
                "{{ {'a': 1} | tojson(indent=4) }}{{ [] | tojson(indent=4) }}{{ [1, 2] | tojson }}",
                "{\n    \"a\": 1\n}[][1, 2]",
            ),
            (
                "{% filter upper %}x{% endfilter %}{{ 'x' is defined and 'y' }}{{ false or 'z' }}{{ not true }}",
                "XyzFalse",
            ),
        ] {
            assert_eq!(template(source).render(&turns()).expect(source), expected, "{source}");
        }
    }

    /// Each with the text that transformers makes of it.
    #[test]
    fn what_templates_take_from_python() {
        for (source, expected) in [
            // None cannot be iterated over, as published templates rely on.
            ("{% if tools is iterable and tools | length > 0 %}t{% else %}f{% endif %}", "f"),
            (
                "{{ none is iterable }}{{ nothing is iterable }}{{ 'a' is iterable }}{{ {} is iterable }}{{ 5 is iterable }}",
                "FalseTrueTrueTrueFalse",
            ),
            (
                "{{ 'a' is sequence }}{{ {} is sequence }}{{ [] is sequence }}{{ none is sequence }}{{ 5 is sequence }}",
                "TrueTrueTrueFalseFalse",
            ),
            ("{{ nothing | length }}{{ nothing | count }}{{ 'h\\u00e9' | length }}{{ messages | count }}", "0023"),
            (
                "{{ 'x' | int }},{{ 'x' | int(7) }},{{ ' 12 ' | int }},{{ '3.9' | int }},{{ none | int }},{{ 3.7 | int }},{{ 'ff' | int(base=16) }}",
                "0,7,12,3,0,3,255",
            ),
            ("{{ '\\u00e9\\ud83d\\ude80' | tojson(ensure_ascii=true) }}", "\"\\u00e9\\ud83d\\ude80\""),
            (
                "{{ {'b': [1, 2], 'a': {'d': 1, 'c': 2}} | tojson(sort_keys=true) }}",
                r#"{"a": {"c": 2, "d": 1}, "b": [1, 2]}"#,
            ),
            ("{{ {'b': [1, 2], 'a': 2} | tojson(separators=(',', ':')) }}", r#"{"b":[1,2],"a":2}"#),
            ("{{ [1, [2]] | tojson(indent='-') }}", "[\n-1,\n-[\n--2\n-]\n]"),
            ("{{ [1] | tojson(indent=-1) }}", "[\n1\n]"),
            ("{{ [1e20, 1e-7, 1.0, 12.5, 1e15] | tojson }}", "[1e+20, 1e-07, 1.0, 12.5, 1000000000000000.0]"),
            (
                "{{ 'abc'.removeprefix('a') }}{{ 'abc'.removesuffix('c') }}{{ 'abc'.removeprefix('x') }}{{ 'abc'.removesuffix('') }}",
                "bcababcabc",
            ),
            (
                "{{ 'aXbXc'.rsplit('X', 1) | join('+') }}{{ ' a  b '.rsplit() | join('+') }}{{ ' a  b '.rsplit(none, 1) | join('+') }}{{ ' a  b '.split(maxsplit=1) | join('+') }}",
                "aXb+ca+b a+ba+b ",
            ),
            (
                "{{ 'aXbXc'.partition('X') | join('+') }}{{ 'aXbXc'.rpartition('X') | join('+') }}{{ 'a'.partition('X') | join('+') }}{{ 'a'.rpartition('X') | join('+') }}",
                "a+X+bXcaXb+X+ca++++a",
            ),
            (
                "{{ '\\u00e9bc'.index('c') }}{{ '\\u00e9b'.find('b') }}{{ 'aba'.rfind('a') }}{{ 'a'.find('b') }}{{ [3, 5].index(5) }}",
                "212-11",
            ),
            ("{{ 'ab'.count('') }}{{ 'abab'.count('ab') }}{{ [1, 2, 1].count(1) }}", "322"),
            (
                "{{ ''.isdigit() }}{{ '12'.isdigit() }}{{ 'a b'.islower() }}{{ ' '.isspace() }}{{ 'A1'.isupper() }}",
                "FalseTrueTrueTrueTrue",
            ),
            ("{{ 'aB'.swapcase() }}{{ '-5'.zfill(4) }}{{ 'a'.ljust(3) }}|{{ 'a'.rjust(3, '.') }}", "Ab-005a  |..a"),
            (
                "{{ [none, true, 1, 1.0, 1e20, 'a', \"it's\", 'q\"', 'b\\n'] }}",
                r#"[None, True, 1, 1.0, 1e+20, 'a', "it's", 'q"', 'b\n']"#,
            ),
            (
                "{{ {'a': none, 'b': [{}]} }}{{ [] }}{{ {'a': 'x'} | string | length }}{{ 1e20 }}{{ 0.5 }}",
                "{'a': None, 'b': [{}]}[]101e+200.5",
            ),
            ("{{ messages[0] }}", "{'role': 'system', 'content': 'Be brief.'}"),
            ("{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}", "aba"),
            ("{% set j = joiner('|') %}{% for i in [1, 2] %}{{ j() }}{{ i }}{% endfor %}", "1|2"),
        ] {
            assert_eq!(template(source).render(&turns()).expect(source), expected, "{source}");
        }
        for (source, expected) in [
            ("{{ 'a'.index('b') }}", "substring not found"),
            ("{{ none | length }}", "none"),
            ("{{ 'a'.split('') }}", "empty separator"),
            ("{{ 1 | tojson(separators=',') }}", "separators"),
            ("{{ 1 | tojson(default=1) }}", "default"),
        ] {
            let message = template(source).render(&turns()).expect_err(source).to_string();
            assert!(message.contains(expected), "{source}: {message}");
        }
    }

    #[test]
    fn a_templates_own_variables() {
        let of_message =
            "{% for m in messages %}[{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.content }}]{% endfor %}";
        let messages = [ChatMessage { reasoning: Some("Well.".into()), ..turns()[2].clone() }, turns()[1].clone()];
        assert_eq!(template(of_message).render(&messages).expect("renders"), "[Well.|Well.|Yes][|| Hi <b> ]");
        let template = template("{{ 'think' if enable_thinking else 'do not' }}");
        assert_eq!(template.render_with(&[], &[("enable_thinking", json!(true))]).expect("renders"), "think");
        assert_eq!(template.render(&[]).expect("renders"), "do not");
    }

    #[test]
    fn a_template_may_refuse() {
        let template = template("{% if messages[0].role != 'user' %}{{ raise_exception('First a user!') }}{% endif %}");
        let message = template.render(&turns()).expect_err("refused").to_string();
        assert_eq!(message, "chat_template.jinja: the chat template refuses these messages: First a user!");
    }

    #[test]
    fn wrong_templates_are_refused_with_their_line() {
        let compile = ChatTemplate::from_source(Path::new("t.jinja"), "a\n{% if %}", Vec::new());
        let message = compile.expect_err("syntax").to_string();
        assert!(message.starts_with("t.jinja: chat template: syntax error") && message.contains("line 2"), "{message}");
        let message = template("\n{{ messages.nothing() }}").render(&[]).expect_err("no method").to_string();
        assert!(message.contains("line 2") && !message.contains('\n'), "{message}");
    }

    #[test]
    fn where_templates_are_found() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let open = || ChatTemplate::open(dir.path()).map(|t| t.render(&[]).expect("renders"));
        assert!(open().expect_err("none").to_string().contains("no chat template"));
        let write = |value: serde_json::Value| {
            fs::write(dir.path().join("tokenizer_config.json"), value.to_string()).expect("a file");
        };
        write(json!({"bos_token": {"content": "<B>"}, "chat_template": "{{ bos_token }}1"}));
        assert_eq!(open().expect("a string"), "<B>1");
        // Older folders name tokens in a file of their own.
        let map = dir.path().join("special_tokens_map.json");
        fs::write(&map, json!({"bos_token": {"content": "<M>"}}).to_string()).expect("a file");
        assert_eq!(open().expect("a string"), "<M>1");
        fs::remove_file(&map).expect("a file");
        write(json!({"chat_template": [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]}));
        assert_eq!(open().expect("the default"), "d");
        write(json!({"chat_template": [{"name": "rag", "template": "r"}, {"name": "tool_use", "template": "t"}]}));
        assert!(
            open().expect_err("no default").to_string().contains("chat_template: rag, tool_use, expected one named")
        );
        write(json!({"chat_template": 5}));
        assert!(open().expect_err("a number").to_string().contains("chat_template: 5, expected"));
        fs::write(dir.path().join("chat_template.jinja"), "file").expect("a file");
        assert_eq!(open().expect("the file wins"), "file");
    }

    #[test]
    fn dates() {
        // 1 March 2024, 13:05:09, a Friday of a leap year.
        let text = strftime("%d %b %Y|%A %a %B %y %m %j|%H:%M:%S %I %p|%F %T|%%|%Q|%", 1_709_298_309);
        assert_eq!(text, "01 Mar 2024|Friday Fri March 24 03 061|13:05:09 01 PM|2024-03-01 13:05:09|%|%Q|%");
        assert_eq!(strftime("%F", 0), "1970-01-01");
        assert_eq!(strftime("%F", 951_782_400), "2000-02-29");
        assert_eq!(strftime("%F", 4_102_444_799), "2099-12-31");
    }
}
