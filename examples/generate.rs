//! Loads a model and prints tokens as they are made.
//!
//! `cargo run --release --example generate -- MODEL_DIR PROMPT`

use perpetua::{Engine, EngineConfig, GenerateOptions, Model};
use std::io::Write;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let [dir, prompt] = <[String; 2]>::try_from(std::env::args().skip(1).collect::<Vec<_>>())
        .map_err(|_| "usage: generate MODEL_DIR PROMPT")?;
    let model = Model::load(dir)?;
    let mut engine = Engine::new(&model, &EngineConfig::default())?;
    for token in engine.generate(&model.encode(&prompt)?, &GenerateOptions::default())? {
        print!("{}", token?.text);
        std::io::stdout().flush()?;
    }
    println!();
    Ok(())
}
