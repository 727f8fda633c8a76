//! `perpetua doctor`: what this machine has and lacks, and the one command that mends each lack.

use super::{Outcome, Rows, bytes, print};
use perpetua::cuda;
use perpetua::cuda::driver::{DeviceInfo, Driver};
use perpetua::device_image::device_image;
use perpetua::exec::memory::available_bytes;
use perpetua::exec::threads::allowed_cores;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

pub(crate) fn run(_: &Args) -> Outcome {
    let mut rows = Rows::default();
    let mut row = |what: &str, found: String| rows.row(what, found);
    row("perpetua", env!("CARGO_PKG_VERSION").to_owned());
    row("cores", format!("{} usable by this process", allowed_cores().len()));
    row("CPU features", perpetua_device::cpu::simd::Isa::best().name().to_owned());
    match available_bytes() {
        Some(n) => row("memory", format!("{} available", bytes(n))),
        None => row("memory", "unknown on this system".to_owned()),
    }
    match device_image() {
        Some(image) => {
            let cubin = image.cubin.map_or(
                "no cubin (the driver compiles the PTX; mend: ./x setup, then build again)".to_owned(),
                |cubin| format!("cubin {}", bytes(cubin.len() as u64)),
            );
            row("device image", format!("PTX {}, {cubin}; {}", bytes(image.ptx.len() as u64), image.built_with));
        }
        None => row(
            "device image",
            "none: this build had no device toolchain; mend: ./x setup, then build again".to_owned(),
        ),
    }
    let module = kernel_module().map(|version| row("kernel module", version));
    match cuda::libcuda() {
        Ok(driver) => {
            let version = driver
                .version()
                .map_or_else(|error| error.to_string(), |v| format!("CUDA {}.{}", v / 1000, v % 1000 / 10));
            row("NVIDIA driver", version);
            match driver.devices() {
                Ok(devices) if devices.is_empty() => row("GPU", cuda::GpuError::NoDevice.to_string()),
                Ok(devices) => devices.iter().for_each(|device| row("GPU", describe(device))),
                Err(error) => row("GPU", error.to_string()),
            }
        }
        // With a kernel module the user expects a GPU, without one only the fact matters.
        Err(error) if module.is_some() => row("NVIDIA driver", error.to_string()),
        Err(_) => row("NVIDIA driver", "none: models run on CPU threads".to_owned()),
    }
    print(&rows.0)
}

fn describe(device: &DeviceInfo) -> String {
    let (major, minor) = device.compute_capability;
    let verdict = match cuda::check_device(device) {
        Ok(()) => "models run on it".to_owned(),
        Err(error) => format!("not used: {error}"),
    };
    format!(
        "{}: {}, compute capability {major}.{minor}, {} SMs, {} KiB of shared memory a block, {}; {verdict}",
        device.ordinal,
        device.name,
        device.n_sms,
        device.shared_bytes >> 10,
        bytes(device.memory_bytes),
    )
}

/// What the kernel module says of itself.
fn kernel_module() -> Option<String> {
    let text = std::fs::read_to_string("/proc/driver/nvidia/version").ok()?;
    text.lines().next().map(|line| line.trim().to_owned())
}
