//! Embeds sentences with a sentence-transformers model and prints how alike they are.
//!
//! `cargo run --release --example similarity -- MODEL_DIR SENTENCE SENTENCE...`

use perpetua::{Embedder, EngineConfig, Model};
use std::time::Instant;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let dir = args.next().ok_or("usage: similarity MODEL_DIR SENTENCE SENTENCE...")?;
    let sentences: Vec<String> = args.collect();

    let began = Instant::now();
    let model = Model::load(dir)?;
    let mut embedder = Embedder::new(&model, &EngineConfig::default())?;
    let loaded = began.elapsed();

    let began = Instant::now();
    let embeddings = sentences.iter().map(|text| embedder.embed(text)).collect::<Result<Vec<_>, _>>()?;
    let embedded = began.elapsed();

    for (row, text) in sentences.iter().enumerate() {
        for column in 0..sentences.len() {
            // The vectors are normalised, so their product is the cosine of their angle.
            let cosine: f32 = embeddings[row].iter().zip(&embeddings[column]).map(|(a, b)| a * b).sum();
            print!("{cosine:6.2}");
        }
        println!("  {text}");
    }
    println!(
        "time: load and compile {:.0} ms (compile {:.1} ms), {} sentences {:.1} ms",
        loaded.as_secs_f64() * 1e3,
        embedder.resident().compile_time().as_secs_f64() * 1e3,
        sentences.len(),
        embedded.as_secs_f64() * 1e3
    );
    Ok(())
}
