//! The committed fixtures through the persistent kernel, on no GPU, with as many SMs as asked for: the whole pass,
//! several tokens, against what `transformers` made of the same prompt. Either its source on the simulated GPU
//! (`simt`), or what rustc made of it, instruction by instruction (`ptx`).
//!
//! `cargo run --release --example gpu_code_fixtures [-- simt|ptx [SMS [TOKENS]]]`; simt, 132 SMs and 4 tokens unless
//! told otherwise.

use perpetua::{Device, Engine, EngineConfig, GenerateOptions, Model};
use safetensors::SafeTensors;
use std::path::Path;
use std::time::Instant;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let device = match args.next().as_deref() {
        None | Some("simt") => Device::Simt,
        Some("ptx") => Device::Ptx,
        Some(other) => return Err(format!("{other}: expected simt or ptx").into()),
    };
    let sms: usize = args.next().map_or(Ok(132), |arg| arg.parse())?;
    let tokens: usize = args.next().map_or(Ok(4), |arg| arg.parse())?;
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let mut wrong = 0;
    for name in ["tiny-qwen3", "tiny-llama", "tiny-qwen2"] {
        let model = Model::load(fixtures.join(name))?;
        let bytes = std::fs::read(fixtures.join(format!("{name}.expected.safetensors")))?;
        let file = SafeTensors::deserialize(&bytes)?;
        let ids = |key: &str| -> Result<Vec<u32>, Box<dyn std::error::Error>> {
            let data = file.tensor(key)?.data().to_vec();
            Ok(data.chunks_exact(8).map(|c| u32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect())
        };
        let (prompt, greedy) = (ids("case0.input_ids")?, ids("case0.greedy_ids")?);
        let expected: Vec<f32> = file.tensor("case0.logits")?.data().chunks_exact(4).map(float).collect();

        let began = Instant::now();
        let config = EngineConfig {
            device,
            threads: Some(sms),
            max_context: Some(prompt.len() + tokens),
            chunks: vec![prompt.len()],
            ..EngineConfig::default()
        };
        let found =
            Engine::new(&model, &EngineConfig { all_logits: true, ..config.clone() })?.logits(&prompt, |_| ())?;
        let vocab = model.config().vocab_size();
        let rows = expected.chunks_exact(vocab).zip(found.chunks_exact(vocab));
        let kl = rows.map(|(p, q)| divergence(p, q)).sum::<f64>() / prompt.len() as f64;
        let read = began.elapsed();

        let began = Instant::now();
        let options =
            GenerateOptions { max_new_tokens: tokens, stop_tokens: Some(Vec::new()), ..GenerateOptions::default() };
        let mut engine = Engine::new(&model, &config)?;
        let made: Vec<u32> =
            engine.generate(&prompt, &options)?.map(|token| token.map(|t| t.id)).collect::<Result<_, _>>()?;
        let same = made.iter().zip(&greedy).take_while(|(a, b)| a == b).count();
        println!(
            "{name}, {sms} SMs: {} positions in {:.1} s, mean KL {kl:.1e}; {} tokens in {:.1} s, {same} as expected",
            prompt.len(),
            read.as_secs_f64(),
            made.len(),
            began.elapsed().as_secs_f64(),
        );
        wrong += u32::from(kl > 1e-3) + u32::from(same < tokens.min(greedy.len()));
    }
    if wrong > 0 {
        return Err(format!("{wrong} result(s) are not as expected").into());
    }
    Ok(())
}

fn float(bytes: &[u8]) -> f32 {
    f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

/// Kullback-Leibler divergence of the distributions two rows of logits stand for.
fn divergence(p: &[f32], q: &[f32]) -> f64 {
    let log_total = |row: &[f32]| row.iter().map(|x| f64::from(*x).exp()).sum::<f64>().ln();
    let (p_total, q_total) = (log_total(p), log_total(q));
    p.iter()
        .zip(q)
        .map(|(p, q)| (f64::from(*p) - p_total, f64::from(*q) - q_total))
        .map(|(p, q)| p.exp() * (p - q))
        .sum()
}
