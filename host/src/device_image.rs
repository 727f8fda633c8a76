//! The device crate as compiled to PTX by build.rs: what a GPU executor loads.

/// The persistent kernel, embedded in this library. Its entry is [`perpetua_shared::launch::ENTRY`].
#[derive(Clone, Copy, Debug)]
pub struct DeviceImage {
    /// PTX for sm_90a; any driver since CUDA 12.1 compiles it.
    pub ptx: &'static str,
    /// The same, assembled, when ptxas was there at build time: it spares the driver the compilation.
    pub cubin: Option<&'static [u8]>,
    /// Which rustc, which flags, which ptxas, and a hash of the PTX; no date, so builds can be compared.
    pub built_with: &'static str,
}

impl DeviceImage {
    /// Major and minor version of the CUDA whose ptxas made the cubin.
    pub fn cubin_cuda(&self) -> Option<(u32, u32)> {
        let (_, version) = self.cubin.and(self.built_with.split_once("cuda_"))?;
        let mut numbers = version.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().ok());
        Some((numbers.next()??, numbers.next()??))
    }
}

/// The device image; `None` when this library was built without a device toolchain (`./x setup` installs one).
// A static and no part of its callers: who has a copy of this function, as programs that link the library may, would have one of the image.
pub fn device_image() -> Option<DeviceImage> {
    static IMAGE: Option<DeviceImage> = include!(concat!(env!("OUT_DIR"), "/device_image.rs"));
    IMAGE
}

/// Each macro kernel as an entry of its own, `perpetua_kernel_` and its module's name, as PTX: to read and to count in. Nothing
/// launches them.
pub fn device_kernels() -> Option<&'static str> {
    include!(concat!(env!("OUT_DIR"), "/device_kernels.rs"))
}
