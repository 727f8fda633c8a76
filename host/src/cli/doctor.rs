//! `perpetua doctor`: what this machine has and lacks, and the one command that mends each lack.

use super::{Outcome, Rows, bytes, print};
use perpetua::cuda::driver::{DeviceInfo, Driver};
use perpetua::cuda::{self, PtxIsa};
use perpetua::device_image::device_image;
use perpetua::exec::memory::available_bytes;
use perpetua::exec::threads::{allowed_cores, usable_cores};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

pub(crate) fn run(_: &Args) -> Outcome {
    let mut rows = Rows::default();
    let mut row = |what: &str, found: String| rows.row(what, found);
    row("perpetua", env!("CARGO_PKG_VERSION").to_owned());
    let quota = match allowed_cores().len() {
        n if n > usable_cores() => format!(": a control group grants it no more time, on {n} cores"),
        _ => String::new(),
    };
    row("cores", format!("{} usable by this process{quota}", usable_cores()));
    row("CPU features", perpetua_device::cpu::simd::Isa::best().name().to_owned());
    match available_bytes() {
        Some(n) => row("memory", format!("{} available", bytes(n))),
        None => row("memory", "unknown on this system".to_owned()),
    }
    match device_image() {
        Some(image) => {
            let code = &image.worker;
            let cubin = code.cubin().map_or(
                "no cubin (the driver compiles the PTX; mend: ./x setup, then build again)".to_owned(),
                |cubin| format!("cubin {}", bytes(cubin.len() as u64)),
            );
            let isa = PtxIsa::of_text(code.ptx()).map_or(String::new(), |isa| format!("ISA {isa}, "));
            row("device image", format!("PTX {isa}{}, {cubin}; {}", bytes(code.ptx().len() as u64), image.built_with));
        }
        None => row(
            "device image",
            "none: this build had no device toolchain; mend: ./x setup, then build again".to_owned(),
        ),
    }
    let module = kernel_module().map(|version| row("kernel module", version));
    match cuda::libcuda() {
        Ok(driver) => {
            let version = driver.version().map_err(|error| error.to_string());
            let offered = device_image()
                .map(|image| Offered { isa: PtxIsa::of_text(image.worker.ptx()), cubin_cuda: image.cubin_cuda() });
            row("NVIDIA driver", version.map_or_else(|error| error, |version| driver_line(version, offered)));
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

/// What a device image offers a driver: PTX of a version, and a cubin that a CUDA's ptxas made.
struct Offered {
    isa: Option<PtxIsa>,
    cubin_cuda: Option<(u32, u32)>,
}

/// What a driver of CUDA `version` is, and what of the image it loads.
fn driver_line(version: u32, offered: Option<Offered>) -> String {
    let cuda = format!("CUDA {}.{}", version / 1000, version % 1000 / 10);
    let Some(taken) = PtxIsa::of_driver(version) else {
        return format!("{cuda}, older than 12.0, which this program wants: update it");
    };
    let at_least = if PtxIsa::is_at_least(version) { "at least " } else { "" };
    let takes = format!("{cuda}, takes PTX ISA {at_least}{taken}");
    let Some(Offered { isa, cubin_cuda }) = offered else { return takes };
    let ptx = match isa {
        Some(wanted) if wanted > taken => Err(format!("this build's PTX is {wanted}, which it does not take")),
        Some(wanted) => Ok(format!("this build's PTX is {wanted}")),
        None => Err("this build's PTX does not say its version".to_owned()),
    };
    // CUDA promises that cubins load in drivers of the same major version, and newer ones.
    let verdict = match (cubin_cuda, ptx) {
        (Some((major, minor)), _) if major <= version / 1000 => {
            format!("the cubin, of CUDA {major}.{minor}, will be loaded")
        }
        (Some((major, minor)), Ok(ptx)) => format!(
            "the cubin, of CUDA {major}.{minor}, is tried first, and where it is too new for the driver the PTX is compiled ({ptx})"
        ),
        (None, Ok(ptx)) => format!("the PTX will be compiled ({ptx}; there is no cubin)"),
        (_, Err(ptx)) => format!("update it: {ptx}"),
    };
    format!("{takes}; {verdict}")
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_driver_is_told_what_it_will_load() {
        let with = |cubin_cuda| Some(Offered { isa: PtxIsa::of_text(".version 8.6\n.target sm_90a\n"), cubin_cuda });
        for (version, offered, line) in [
            (12080, None, "CUDA 12.8, takes PTX ISA 8.7"),
            (
                12080,
                with(None),
                "CUDA 12.8, takes PTX ISA 8.7; the PTX will be compiled (this build's PTX is 8.6; there is no cubin)",
            ),
            (
                12080,
                with(Some((13, 0))),
                "CUDA 12.8, takes PTX ISA 8.7; the cubin, of CUDA 13.0, is tried first, and where it is too new for the driver \
                 the PTX is compiled (this build's PTX is 8.6)",
            ),
            (13000, with(Some((13, 0))), "CUDA 13.0, takes PTX ISA 9.0; the cubin, of CUDA 13.0, will be loaded"),
            (
                99000,
                with(Some((13, 0))),
                "CUDA 99.0, takes PTX ISA at least 9.1; the cubin, of CUDA 13.0, will be loaded",
            ),
            (
                12060,
                with(Some((13, 0))),
                "CUDA 12.6, takes PTX ISA 8.5; update it: this build's PTX is 8.6, which it does not take",
            ),
            (11080, None, "CUDA 11.8, older than 12.0, which this program wants: update it"),
        ] {
            assert_eq!(driver_line(version, offered), line);
        }
    }
}
