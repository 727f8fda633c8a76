//! An engine on the context and stream that a program already has from cudarc: the kernel takes its turn on that
//! stream.
//!
//! `cargo run --release --features cudarc --example with_cudarc -- MODEL_DIR PROMPT`

use cudarc::driver::CudaContext;
use perpetua::cuda::Gpu;
use perpetua::{Device, Engine, EngineConfig, GenerateOptions, Model};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let (Some(dir), Some(prompt)) = (args.next(), args.next()) else {
        return Err("usage: with_cudarc MODEL_DIR PROMPT".into());
    };
    // cudarc panics where there is no driver; perpetua's own look at it says why.
    let stream = match Gpu::open() {
        Ok(_) => CudaContext::new(0)?.new_stream()?,
        Err(error) => return Err(error.into()),
    };
    let gpu = Gpu::from_cudarc(&stream)?;
    let model = Model::load(dir)?;
    let config = EngineConfig { device: Device::Cuda, gpu: Some(gpu), ..EngineConfig::default() };
    let mut engine = Engine::new(&model, &config)?;
    for token in engine.generate(&model.encode(&prompt)?, &GenerateOptions::default())? {
        print!("{}", token?.text);
    }
    println!();
    Ok(())
}
