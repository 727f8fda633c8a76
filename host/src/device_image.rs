//! The device crate as compiled to PTX by build.rs: what a GPU executor loads.

use std::fmt::{Debug, Formatter, Result};
use std::str;
use std::sync::OnceLock;

use miniz_oxide::inflate::decompress_to_vec_zlib_with_limit;

/// This build's GPU code, embedded in this library: a module for each way in which it is launched.
#[derive(Debug)]
pub struct DeviceImage {
    /// The persistent kernel, and the probes.
    pub worker: DeviceModule,
    /// A launch per operator.
    pub operator: DeviceModule,
    /// Which rustc, which flags, which ptxas, and a hash of the PTX; no date, so builds can be compared.
    pub built_with: &'static str,
}

/// Code that a driver loads.
#[derive(Debug)]
pub struct DeviceModule {
    /// What is launched of it: [`launch::ENTRY`](perpetua_shared::launch::ENTRY) or
    /// [`launch::OPERATOR`](perpetua_shared::launch::OPERATOR).
    pub entry: &'static str,
    ptx: Deflated,
    cubin: Option<Deflated>,
    ptxas_report: Option<&'static str>,
}

impl DeviceModule {
    /// PTX for sm_90a; any driver since CUDA 12.1 compiles it.
    pub fn ptx(&self) -> &str {
        self.ptx.text()
    }

    /// The same, assembled, when ptxas was there at build time: it spares the driver the compilation.
    pub fn cubin(&self) -> Option<&[u8]> {
        self.cubin.as_ref().map(Deflated::bytes)
    }

    /// What `ptxas -v` said when it made that: registers, stack, spills and shared memory of each kernel.
    pub fn ptxas_report(&self) -> Option<&str> {
        self.ptxas_report
    }
}

impl DeviceImage {
    /// Both modules.
    pub fn modules(&self) -> [&DeviceModule; 2] {
        [&self.worker, &self.operator]
    }

    /// Major and minor version of the CUDA whose ptxas made the cubins.
    pub fn cubin_cuda(&self) -> Option<(u32, u32)> {
        self.worker.cubin.as_ref().and_then(|_| cuda_of_ptxas(self.built_with))
    }
}

/// The version in what a ptxas says of itself, as in `ptxas Build cuda_13.0.r13.0/compiler.1_0`.
fn cuda_of_ptxas(words: &str) -> Option<(u32, u32)> {
    let (_, version) = words.split_once("cuda_")?;
    let mut numbers = version.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().ok());
    Some((numbers.next()??, numbers.next()??))
}

/// The device image; `None` when this library was built without a device toolchain (`./x setup` installs one).
// A static and no part of its callers: who has a copy of this function, as programs that link the library may, would
// have one of the image.
pub fn device_image() -> Option<&'static DeviceImage> {
    static IMAGE: Option<DeviceImage> = include!(concat!(env!("OUT_DIR"), "/device_image.rs"));
    IMAGE.as_ref()
}

/// Each macro kernel as an entry of its own, `perpetua_kernel_` and its module's name, as PTX: to read and to count in.
/// Nothing launches them.
pub fn device_kernels() -> Option<&'static str> {
    static KERNELS: Option<Deflated> = include!(concat!(env!("OUT_DIR"), "/device_kernels.rs"));
    KERNELS.as_ref().map(Deflated::text)
}

/// Bytes that build.rs has deflated, in zlib's format. They are inflated once, when they are first wanted.
struct Deflated {
    deflated: &'static [u8],
    len: usize,
    bytes: OnceLock<Vec<u8>>,
}

impl Deflated {
    // Only an image has any: a build without a device toolchain makes none.
    #[allow(dead_code)]
    const fn new(deflated: &'static [u8], len: usize) -> Deflated {
        Deflated { deflated, len, bytes: OnceLock::new() }
    }

    fn bytes(&self) -> &[u8] {
        self.bytes.get_or_init(|| {
            decompress_to_vec_zlib_with_limit(self.deflated, self.len).expect("as build.rs has deflated it")
        })
    }

    fn text(&self) -> &str {
        str::from_utf8(self.bytes()).expect("PTX is text")
    }
}

impl Debug for Deflated {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        write!(f, "{} bytes, {} deflated", self.len, self.deflated.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use perpetua_shared::launch;

    #[test]
    fn ptxas_says_which_cuda_it_is_of() {
        let words = "rustc 1.95.0; -Ctarget-cpu=sm_90a; ptxas Build cuda_13.0.r13.0/compiler.1_0; ptx fnv-1a 0";
        assert_eq!(cuda_of_ptxas(words), Some((13, 0)));
        assert_eq!(cuda_of_ptxas("rustc 1.95.0; no ptxas; ptx fnv-1a 0"), None);
    }

    #[test]
    fn what_is_embedded_is_as_long_as_it_was() {
        let Some(image) = device_image() else { return };
        for module in image.modules() {
            assert_eq!(module.ptx().len(), module.ptx.len);
            assert!(module.ptx().contains(&format!(".entry {}(", module.entry)));
            assert_eq!(module.cubin().map(<[u8]>::len), module.cubin.as_ref().map(|cubin| cubin.len));
            assert!(module.cubin().is_none_or(|cubin| cubin.starts_with(b"\x7fELF")));
        }
        assert_eq!(image.modules().map(|module| module.entry), [launch::ENTRY, launch::OPERATOR]);
    }
}
