//! Answers the lines of standard input as they come, several at once: whoever comes later joins those under way.
//!
//! ```sh
//! cargo run --release --example batch -- path/to/Qwen3-0.6B 4 < questions.txt
//! ```

use perpetua::{Engine, EngineConfig, EngineError, GenerateOptions, Model};
use std::collections::{BTreeMap, VecDeque};
use std::sync::mpsc::channel;
use std::time::Duration;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let dir = args.next().ok_or("usage: batch MODEL_DIR [SEQUENCES]")?;
    let sequences = args.next().map_or(Ok(4), |n| n.parse())?;
    let model = Model::load(dir)?;
    let mut engine = Engine::new(&model, &EngineConfig { sequences: Some(sequences), ..EngineConfig::default() })?;
    let (send, lines) = channel();
    std::thread::spawn(move || std::io::stdin().lines().map_while(Result::ok).try_for_each(|line| send.send(line)));

    let mut batch = engine.batch()?;
    let (mut waiting, mut answers) = (VecDeque::new(), BTreeMap::<usize, String>::new());
    loop {
        if batch.is_ended() && waiting.is_empty() {
            // Nobody is under way, and nobody will be until there is a line.
            let Ok(line) = lines.recv() else { return Ok(()) };
            waiting.push_back(line);
        }
        waiting.extend(lines.try_iter());
        while batch.room() > 0
            && let Some(line) = waiting.pop_front()
        {
            // What several lines begin with is read once.
            let options = GenerateOptions { reuse_prefix: true, ..GenerateOptions::default() };
            match batch.add(&model.encode(&line)?, &options) {
                Ok(number) => println!("{number} < {line}"),
                // Somebody's fault ends all.
                Err(error @ EngineError::Run(_)) => return Err(error.into()),
                Err(error) => eprintln!("{line:?}: {error}"),
            }
        }
        if let Some((number, token)) = batch.poll(Duration::from_millis(20))? {
            answers.entry(number).or_default().push_str(&token.text);
            if let Some(end) = batch.end(number) {
                println!("{number} > {} ({end:?})", answers.remove(&number).unwrap_or_default().replace('\n', " "));
            }
        }
    }
}
