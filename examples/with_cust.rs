//! An engine on the context and stream that a program already has from cust: the kernel takes its turn on that stream.
//!
//! `cargo run --release --features cust --example with_cust -- MODEL_DIR PROMPT`. cust's build script wants a directory
//! with a `lib64` in it as `CUDA_LIBRARY_PATH`, and the program links libcuda, so it starts only where a driver is.

use cust::context::Context;
use cust::device::Device as CustDevice;
use cust::stream::{Stream, StreamFlags};
use cust::{CudaFlags, init};
use perpetua::cuda::Gpu;
use perpetua::{Device, Engine, EngineConfig, GenerateOptions, Model};
use std::sync::Arc;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let (Some(dir), Some(prompt)) = (args.next(), args.next()) else {
        return Err("usage: with_cust MODEL_DIR PROMPT".into());
    };
    init(CudaFlags::empty())?;
    let context = Arc::new(Context::new(CustDevice::get_device(0)?)?);
    let stream = Arc::new(Stream::new(StreamFlags::NON_BLOCKING, None)?);
    let gpu = Gpu::from_cust(&context, Some(stream))?;
    let model = Model::load(dir)?;
    let config = EngineConfig { device: Device::Cuda, gpu: Some(gpu), ..EngineConfig::default() };
    let mut engine = Engine::new(&model, &config)?;
    for token in engine.generate(&model.encode(&prompt)?, &GenerateOptions::default())? {
        print!("{}", token?.text);
    }
    println!();
    Ok(())
}
