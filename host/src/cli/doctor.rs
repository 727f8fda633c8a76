//! `perpetua doctor`: what this machine has and lacks, and the one command that mends each lack.

use super::{Outcome, bytes};
use perpetua::device_image::device_image;
use perpetua::exec::memory::available_bytes;
use perpetua::exec::threads::allowed_cores;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

pub(crate) fn run(_: &Args) -> Outcome {
    let row = |what: &str, found: String| println!("{what:14} {found}");
    row("perpetua", env!("CARGO_PKG_VERSION").to_owned());
    row("cores", format!("{} usable by this process", allowed_cores().len()));
    row("CPU features", perpetua_device::cpu::simd::Isa::best().name().to_owned());
    match available_bytes() {
        Some(n) => row("memory", format!("{} available", bytes(n))),
        None => row("memory", "unknown on this system".to_owned()),
    }
    match device_image() {
        Some(image) => {
            let cubin = image.cubin.map_or("no cubin (the driver compiles the PTX)".to_owned(), |cubin| {
                format!("cubin {}", bytes(cubin.len() as u64))
            });
            row("device image", format!("PTX {}, {cubin}; {}", bytes(image.ptx.len() as u64), image.built_with));
        }
        None => row(
            "device image",
            "none: this build had no device toolchain; mend: ./x setup, then build again".to_owned(),
        ),
    }
    match driver() {
        Some(version) => row("NVIDIA driver", version),
        None => row("NVIDIA driver", "none: models run on CPU threads".to_owned()),
    }
    Ok(())
}

/// What the kernel module says of itself; libcuda is not opened, since no executor uses it yet.
fn driver() -> Option<String> {
    let text = std::fs::read_to_string("/proc/driver/nvidia/version").ok()?;
    text.lines().next().map(|line| line.trim().to_owned())
}
