//! Answers over HTTP as OpenAI's chat completions do, several at once, word by word where that is asked for. Whoever
//! comes later joins those under way, whoever hangs up leaves them, and what several prompts begin with is read once.
//!
//! ```sh
//! cargo run --release --example serve -- path/to/Qwen3-0.6B 127.0.0.1:8080 4
//! curl http://127.0.0.1:8080/v1/chat/completions -H 'Content-Type: application/json' \
//!     -d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "stream": true}'
//! ```
//!
//! Of a request's keys it heeds `messages`, `stream`, `max_tokens` (or `max_completion_tokens`), `temperature`,
//! `top_p`, `seed`, `stop`, and `chat_template_kwargs`, variables of the chat template. Reasoning comes as
//! `reasoning_content`.

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use perpetua::engine::EngineError;
use perpetua::model::{ReasoningParser, TurnPart};
use perpetua::{ChatMessage, End, Engine, EngineConfig, GenerateOptions, Model};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::net::TcpListener;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::UnboundedReceiverStream;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let dir = args.next().ok_or("usage: serve MODEL_DIR [ADDRESS] [SEQUENCES]")?;
    let address = args.next().unwrap_or_else(|| "127.0.0.1:8080".to_owned());
    let sequences = args.next().map_or(Ok(4), |n| n.parse())?;
    let server = Server::new(&dir, &EngineConfig { sequences: Some(sequences), ..EngineConfig::default() })?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let listener = TcpListener::bind(&address).await?;
        println!("http://{}/v1/chat/completions", listener.local_addr()?);
        Ok(axum::serve(listener, server.router()).await?)
    })
}

/// Requests that may wait for room; whoever comes beyond is told to come again.
const MAX_WAITING: usize = 256;

/// Requests that a batch remembers, if nobody is under way, before another takes its place.
const MAX_REMEMBERED: usize = 1 << 20;

/// What every connection has of the engine, which runs in a thread of its own.
#[derive(Clone)]
struct Server {
    name: String,
    model: Model,
    context: usize,
    jobs: SyncSender<Job>,
}

/// What is asked of the engine.
struct Job {
    prompt: Vec<u32>,
    options: GenerateOptions,
    parser: ReasoningParser,
    said: UnboundedSender<Said>,
}

/// What it says to that.
enum Said {
    Text(TurnPart, String),
    End { reason: &'static str, tokens: usize },
    Failed(StatusCode, String),
}

impl Server {
    fn new(dir: &str, config: &EngineConfig) -> Result<Server, Box<dyn std::error::Error>> {
        let model = Model::load(dir)?;
        // A model without a template says so before its weights are read.
        model.encode_chat(&[ChatMessage::new("user", "")])?;
        let mut engine = Engine::new(&model, config)?;
        let (jobs, asked) = sync_channel(MAX_WAITING);
        let context = engine.context();
        std::thread::spawn(move || {
            loop {
                let mut under_way = UnderWay::default();
                match answer(&mut engine, &asked, &mut under_way) {
                    Ok(true) => {}
                    Ok(false) => return,
                    // A fault ends all that are under way, and no others.
                    Err(error) => {
                        eprintln!("serve: {error}");
                        for (job, _) in under_way.into_values() {
                            let _ = job.said.send(Said::Failed(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()));
                        }
                    }
                }
            }
        });
        let name = dir.trim_end_matches('/').rsplit('/').next().unwrap_or(dir).to_owned();
        Ok(Server { name, model, context, jobs })
    }

    fn router(self) -> Router {
        let models =
            json!({ "object": "list", "data": [{ "id": self.name, "object": "model", "owned_by": "perpetua" }] });
        Router::new()
            .route("/v1/chat/completions", post(complete))
            .route("/v1/models", get(|| async { Json(models) }))
            .with_state(self)
    }

    /// What `request` asks for, of the engine.
    fn job(&self, request: &Request, said: UnboundedSender<Said>) -> Result<Job, String> {
        let messages = request.messages.iter().map(Message::of_template).collect::<Result<Vec<_>, _>>()?;
        let variables: Vec<_> = request.chat_template_kwargs.iter().map(|(k, v)| (k.as_str(), v.clone())).collect();
        let prompt = self.model.encode_chat_with(&messages, &variables).map_err(|error| error.to_string())?;
        if prompt.len() > self.context {
            return Err(format!("the prompt has {} tokens, expected at most {}", prompt.len(), self.context));
        }
        let options = GenerateOptions {
            max_new_tokens: request.max_completion_tokens.or(request.max_tokens).unwrap_or(self.context),
            temperature: request.temperature.unwrap_or(1.0),
            top_p: request.top_p.unwrap_or(1.0),
            seed: request.seed.unwrap_or_else(|| now().as_nanos() as u64),
            stop_strings: request.stop.clone().map_or_else(Vec::new, Stop::texts),
            reuse_prefix: true,
            ..GenerateOptions::default()
        };
        options.check().map_err(|error| error.to_string())?;
        let parser = self.model.reasoning_parser(&prompt).map_err(|error| error.to_string())?;
        Ok(Job { prompt, options, parser, said })
    }
}

/// By the number that the batch has given it, a job, and how many tokens have been made.
type UnderWay = BTreeMap<usize, (Job, usize)>;

/// Answers all that are `asked`, as many at once as there is room for; the others wait where they are. A batch
/// remembers what its caches have, so that a conversation goes on where it was, and all that it has had: whether there
/// is to be another one, or nobody can ask any more.
///
/// # Errors
/// The engine's fault, which ends all that are `under_way`.
fn answer(engine: &mut Engine, asked: &Receiver<Job>, under_way: &mut UnderWay) -> Result<bool, EngineError> {
    let mut batch = engine.batch()?;
    let (mut next, mut had) = (None, 0);
    loop {
        if batch.is_ended() && under_way.is_empty() {
            if had > MAX_REMEMBERED {
                return Ok(true);
            }
            let Ok(job) = asked.recv() else { return Ok(false) };
            next = Some(job);
        }
        while batch.room() > 0
            && let Some(job) = next.take().or_else(|| asked.try_recv().ok())
        {
            had += 1;
            if job.said.is_closed() {
                continue;
            }
            match batch.add(&job.prompt, &job.options) {
                Ok(number) => drop(under_way.insert(number, (job, 0))),
                Err(error @ EngineError::Run(_)) => {
                    let _ = job.said.send(Said::Failed(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()));
                    return Err(error);
                }
                Err(error) => drop(job.said.send(Said::Failed(StatusCode::BAD_REQUEST, error.to_string()))),
            }
        }
        if let Some((number, token)) = batch.poll(Duration::from_millis(20))?
            && let Some((job, made)) = under_way.get_mut(&number)
        {
            *made += 1;
            if let Some((part, text)) = job.parser.push(token.id, &token.text) {
                let _ = job.said.send(Said::Text(part, text.to_owned()));
            }
        }
        let left = under_way.iter().filter(|(_, (job, _))| job.said.is_closed()).map(|(number, _)| *number);
        for number in left.collect::<Vec<_>>() {
            under_way.remove(&number);
            batch.cancel(number)?;
        }
        under_way.retain(|number, (job, tokens)| {
            let reason = match batch.end(*number) {
                None => return true,
                Some(End::MaxTokens | End::ContextFull | End::Deadline) => "length",
                Some(_) => "stop",
            };
            let _ = job.said.send(Said::End { reason, tokens: *tokens });
            false
        });
    }
}

#[derive(Deserialize)]
struct Request {
    messages: Vec<Message>,
    #[serde(default)]
    stream: bool,
    max_tokens: Option<usize>,
    max_completion_tokens: Option<usize>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    seed: Option<u64>,
    stop: Option<Stop>,
    #[serde(default)]
    chat_template_kwargs: Map<String, Value>,
}

#[derive(Deserialize)]
struct Message {
    role: String,
    content: Content,
    reasoning_content: Option<String>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    Parts(Vec<Map<String, Value>>),
}

#[derive(Clone, Deserialize)]
#[serde(untagged)]
enum Stop {
    One(String),
    Several(Vec<String>),
}

impl Stop {
    fn texts(self) -> Vec<String> {
        match self {
            Stop::One(text) => vec![text],
            Stop::Several(texts) => texts,
        }
    }
}

impl Message {
    fn of_template(&self) -> Result<ChatMessage, String> {
        let text_of = |part: &Map<String, Value>| match part.get("text") {
            Some(Value::String(text)) => Ok(text.clone()),
            _ => Err(format!("a message's part is {}, expected a text", Value::from(part.clone()))),
        };
        let content = match &self.content {
            Content::Text(text) => text.clone(),
            Content::Parts(parts) => parts.iter().map(text_of).collect::<Result<String, _>>()?,
        };
        Ok(ChatMessage { reasoning: self.reasoning_content.clone(), ..ChatMessage::new(&self.role, content) })
    }
}

/// `POST /v1/chat/completions`.
async fn complete(
    State(server): State<Server>,
    request: Result<Json<Request>, axum::extract::rejection::JsonRejection>,
) -> Response {
    let Json(request) = match request {
        Ok(request) => request,
        Err(error) => return refused(error.status(), error.body_text()),
    };
    let (send, said) = unbounded_channel();
    let (is_stream, of) = (request.stream, server.clone());
    // A long prompt takes its time, which others' words need not wait for.
    let job = match tokio::task::spawn_blocking(move || of.job(&request, send)).await {
        Ok(Ok(job)) => job,
        Ok(Err(why)) => return refused(StatusCode::BAD_REQUEST, why),
        Err(error) => return refused(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
    };
    let (began, prompt_tokens) = (now(), job.prompt.len());
    let id = format!("chatcmpl-{:x}", began.as_nanos());
    let about = About { id, model: server.name, created: began.as_secs(), prompt_tokens };
    match server.jobs.try_send(job) {
        Err(TrySendError::Full(_)) => {
            refused(StatusCode::SERVICE_UNAVAILABLE, format!("{MAX_WAITING} others are waiting"))
        }
        Err(TrySendError::Disconnected(_)) => refused(StatusCode::INTERNAL_SERVER_ERROR, GONE.to_owned()),
        Ok(()) if is_stream => about.stream(said).into_response(),
        Ok(()) => about.whole(said).await,
    }
}

const GONE: &str = "the engine has ended";

/// What every answer to a request says.
struct About {
    id: String,
    model: String,
    created: u64,
    prompt_tokens: usize,
}

impl About {
    fn object(&self, kind: &str, choice: Value) -> Value {
        json!({
            "id": self.id, "object": kind, "created": self.created, "model": self.model,
            "choices": [choice],
        })
    }

    fn usage(&self, tokens: usize) -> Value {
        let prompt = self.prompt_tokens;
        json!({ "prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens })
    }

    async fn whole(self, mut said: UnboundedReceiver<Said>) -> Response {
        let (mut content, mut reasoning) = (String::new(), String::new());
        loop {
            match said.recv().await {
                Some(Said::Text(TurnPart::Answer, text)) => content.push_str(&text),
                Some(Said::Text(TurnPart::Reasoning, text)) => reasoning.push_str(&text),
                Some(Said::Failed(status, why)) => return refused(status, why),
                Some(Said::End { reason, tokens }) => {
                    let mut message = json!({ "role": "assistant", "content": content });
                    if !reasoning.is_empty() {
                        message["reasoning_content"] = reasoning.into();
                    }
                    let choice = json!({ "index": 0, "message": message, "finish_reason": reason });
                    let mut answer = self.object("chat.completion", choice);
                    answer["usage"] = self.usage(tokens);
                    return Json(answer).into_response();
                }
                None => return refused(StatusCode::INTERNAL_SERVER_ERROR, GONE.to_owned()),
            }
        }
    }

    fn stream(self, said: UnboundedReceiver<Said>) -> Sse<impl tokio_stream::Stream<Item = Result<Event, Infallible>>> {
        let chunk = move |said: Said| {
            let of = |delta: Value, reason: Value| {
                self.object("chat.completion.chunk", json!({ "index": 0, "delta": delta, "finish_reason": reason }))
            };
            match said {
                Said::Text(TurnPart::Answer, text) => of(json!({ "role": "assistant", "content": text }), Value::Null),
                Said::Text(TurnPart::Reasoning, text) => {
                    of(json!({ "role": "assistant", "reasoning_content": text }), Value::Null)
                }
                Said::Failed(status, why) => error_of(status, why),
                Said::End { reason, tokens } => {
                    let mut last = of(json!({}), reason.into());
                    last["usage"] = self.usage(tokens);
                    last
                }
            }
        };
        let chunks =
            UnboundedReceiverStream::new(said).map(chunk).map(|chunk| Event::default().data(chunk.to_string()));
        let end = tokio_stream::once(Event::default().data("[DONE]"));
        Sse::new(chunks.chain(end).map(Ok)).keep_alive(KeepAlive::default())
    }
}

fn error_of(status: StatusCode, why: String) -> Value {
    let kind = if status.is_client_error() { "invalid_request_error" } else { "server_error" };
    json!({ "error": { "message": why, "type": kind } })
}

fn refused(status: StatusCode, why: String) -> Response {
    (status, Json(error_of(status, why))).into_response()
}

fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use perpetua::Device;
    use std::io::{Read, Write};
    use std::net::{SocketAddr, TcpStream};
    use std::sync::mpsc::channel;

    fn fixture() -> String {
        format!("{}/tests/fixtures/tiny-qwen3", env!("CARGO_MANIFEST_DIR"))
    }

    fn config() -> EngineConfig {
        EngineConfig {
            device: Device::Cpu,
            sequences: Some(2),
            threads: Some(2),
            max_context: Some(128),
            ..EngineConfig::default()
        }
    }

    /// A server's address, who answers until the program ends.
    fn begin(dir: &str, config: &EngineConfig) -> SocketAddr {
        let server = Server::new(dir, config).expect("the fixture");
        let (send, address) = channel();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async {
                let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
                send.send(listener.local_addr().expect("it has one")).expect("somebody waits");
                axum::serve(listener, server.router()).await.expect("it serves");
            });
        });
        address.recv().expect("it has begun")
    }

    /// Sends `body` to `path`, and what comes back: the status, and the body.
    fn ask(to: SocketAddr, path: &str, body: &str) -> (u16, String) {
        let mut stream = send(to, path, body);
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
        (head.split(' ').nth(1).and_then(|code| code.parse().ok()).expect("a status"), body.to_owned())
    }

    fn send(to: SocketAddr, path: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(to).expect("it listens");
        let (method, length) = (if body.is_empty() { "GET" } else { "POST" }, body.len());
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
        )
        .expect("sent");
        stream
    }

    const PATH: &str = "/v1/chat/completions";

    #[test]
    fn it_answers_as_the_engine_does() {
        let model = Model::load(fixture()).expect("the fixture");
        let mut engine = Engine::new(&model, &config()).expect("it compiles");
        let mut said = |question: &str| -> String {
            let prompt = model.encode_chat(&[ChatMessage::new("user", question)]).expect("a prompt");
            let options = GenerateOptions { max_new_tokens: 12, ..GenerateOptions::default() };
            let all = engine.generate_batch(&[prompt], &options).expect("it runs");
            all.map(|token| token.expect("a token").1.text).collect()
        };
        let questions = ["What may I do?", "And what not?", "Why?"];
        let expected = questions.map(&mut said);
        let to = begin(&fixture(), &config());
        let request = |question: &str, stream: bool| {
            json!({ "messages": [{ "role": "user", "content": question }], "max_tokens": 12, "temperature": 0, "stream": stream }).to_string()
        };
        // More at once than there is room for, one of them word by word, one who hangs up.
        drop(send(to, PATH, &request("Nobody listens", true)));
        let answers: Vec<String> = std::thread::scope(|scope| {
            let each =
                questions.map(|question| scope.spawn(move || ask(to, PATH, &request(question, question == "Why?"))));
            each.map(|answer| answer.join().expect("an answer"))
                .map(|(status, body)| {
                    assert_eq!(status, 200, "{body}");
                    body
                })
                .to_vec()
        });
        for (answer, expected) in answers.iter().zip(&expected).take(2) {
            let answer: Value = serde_json::from_str(answer).expect("JSON");
            assert_eq!(answer["choices"][0]["message"]["content"], **expected);
            assert_eq!(
                (&answer["choices"][0]["finish_reason"], &answer["usage"]["completion_tokens"]),
                (&json!("length"), &json!(12))
            );
        }
        let events: Vec<&str> =
            answers[2].lines().filter_map(|line| line.split_once("data: ").map(|(_, data)| data)).collect();
        let (done, chunks) = events.split_last().expect("events");
        let chunks: Vec<Value> = chunks.iter().map(|chunk| serde_json::from_str(chunk).expect("JSON")).collect();
        let text: String = chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
        assert_eq!((*done, text), ("[DONE]", expected[2].clone()));
        assert_eq!(chunks.last().expect("one")["choices"][0]["finish_reason"], "length");

        let (status, models) = ask(to, "/v1/models", "");
        assert!(status == 200 && models.contains("\"tiny-qwen3\""), "{models}");
    }

    /// Of two who are answered one after the other the first hangs up, whose answer would fill the context: the second
    /// has what is its own.
    #[test]
    fn whoever_hangs_up_leaves() {
        let to = begin(&fixture(), &EngineConfig { sequences: Some(1), max_context: Some(4096), ..config() });
        let ask_for = |tokens: usize, stream: bool| json!({ "messages": [{ "role": "user", "content": "Why?" }], "max_tokens": tokens, "temperature": 0, "stream": stream, "stop": [] });
        let mut long = send(to, PATH, &ask_for(4000, true).to_string());
        let mut beginning = [0; 600];
        long.read_exact(&mut beginning).expect("it has begun");
        assert!(String::from_utf8_lossy(&beginning).contains("200 OK"));
        drop(long);
        // One that is given up before it has begun is not read at all.
        drop(send(to, PATH, &ask_for(4000, false).to_string()));
        let (status, body) = ask(to, PATH, &ask_for(3, false).to_string());
        let answer: Value = serde_json::from_str(&body).expect("JSON");
        assert_eq!((status, &answer["usage"]["completion_tokens"]), (200, &json!(3)), "{body}");
    }

    #[test]
    fn reasoning_comes_apart() {
        let temp = tempfile::tempdir().expect("a temporary folder");
        for entry in std::fs::read_dir(fixture()).expect("the fixture") {
            let (from, name) = entry.map(|entry| (entry.path(), entry.file_name())).expect("a file");
            match std::fs::read_to_string(&from) {
                Ok(text) => std::fs::write(
                    temp.path().join(name),
                    text.replace("<|endoftext|>", "<think>").replace("<|im_start|>", "</think>"),
                ),
                Err(_) => std::fs::copy(&from, temp.path().join(name)).map(drop),
            }
            .expect("copied");
        }
        let template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if effort == 'some' %}<think>{% endif %}";
        std::fs::write(temp.path().join("chat_template.jinja"), template).expect("written");
        let to = begin(&temp.path().to_string_lossy(), &config());
        let said = |effort: &str, stream: bool| {
            let messages = json!([{ "role": "user", "content": "What may I do?" }]);
            let request = json!({ "messages": messages, "max_tokens": 6, "temperature": 0, "stream": stream, "chat_template_kwargs": { "effort": effort } });
            ask(to, PATH, &request.to_string()).1
        };
        let message = |effort: &str| {
            serde_json::from_str::<Value>(&said(effort, false)).expect("JSON")["choices"][0]["message"].clone()
        };
        let (some, none) = (message("some"), message("none"));
        assert!(
            some["content"] == "" && some["reasoning_content"].as_str().is_some_and(|text| !text.is_empty()),
            "{some}"
        );
        assert!(none["content"] != "" && none["reasoning_content"].is_null(), "{none}");
        let events = said("some", true);
        assert!(events.contains("\"reasoning_content\"") && !events.contains("\"content\""), "{events}");
    }

    #[test]
    fn what_cannot_be_is_refused_in_a_line() {
        let to = begin(&fixture(), &config());
        let user = |content: Value| json!([{ "role": "user", "content": content }]);
        for (request, expected) in [
            (json!({ "messages": user("Hi".into()), "temperature": -1 }), "temperature -1: expected"),
            (json!({ "messages": user("Hi".into()), "stop": "" }), "stop string"),
            (json!({ "messages": user(json!([{ "type": "image_url" }])) }), "expected a text"),
            (json!({ "messages": user("word ".repeat(500).into()), "stream": true }), "tokens, expected at most 128"),
            (json!({ "messages": user(1.into()) }), "messages"),
            (json!({}), "missing field `messages`"),
        ] {
            let (status, body) = ask(to, PATH, &request.to_string());
            let body: Value = serde_json::from_str(&body).expect("JSON");
            let message = body["error"]["message"].as_str().expect("a message");
            assert!((400..500).contains(&status) && message.contains(expected), "{status} {message}");
        }
        // Others are answered still.
        let parts =
            json!({ "messages": user(json!([{ "type": "text", "text": "Hi" }])), "max_tokens": 2, "stop": ["x", "y"] });
        assert_eq!(ask(to, PATH, &parts.to_string()).0, 200);
    }
}
