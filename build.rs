//! Compiles the device crate to PTX and embeds it in the library.
//!
//! The shape is `cuda_builder`'s: a builder with a path, an architecture, a place to copy to, and `build()`. Underneath
//! is rustc's own nvptx64 target, which needs no CUDA toolkit, only the source of `core`: see [`Toolchain::find`] for
//! where that comes from. Where no such rustc is found the build warns, says what to do, and goes on without a GPU
//! image; where one is found and the device crate does not compile, the build fails.
//!
//! LLVM compiles one module on one core, and that is what takes the time, so the device crate is compiled once for each
//! of its [modules](MODULES), side by side. Out come, in `OUT_DIR`, `device_image.rs` and `device_kernels.rs` (what
//! `host/src/device_image.rs` includes), `worker.ptx`, `operator.ptx`, when ptxas is found a `.cubin` of either, and
//! `kernels.ptx`, which only tests and readers want. Each is embedded deflated: PTX takes a sixth of its room so.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::{env, fs, io, thread};

use miniz_oxide::deflate::compress_to_vec_zlib;

/// The device crate's features that each make a module: the persistent kernel and the probes; one launch per operator;
/// and each macro kernel and each generated body as an entry of its own.
const MODULES: [&str; 3] = ["worker", "operator", "kernels"];

/// The toolchain that `cargo` names for this build, another one by name, and the assembler by name.
const DEVICE_RUSTC: &str = "PERPETUA_DEVICE_RUSTC";
const PTXAS: &str = "PERPETUA_PTXAS";

/// Why each flag: `target-cpu` Hopper with wgmma and TMA; `ptx81` the ISA version that they and additions of vectors
/// want, old enough for every driver since CUDA 12.1; `-JumpThreading` because that MIR pass copies a barrier into both
/// arms of a branch (rust-lang/rust#137086), after which a warp waits at two different ones; `immediate-abort` because
/// a panic's message has no reader on the device, and the calls that would build it cost the whole kernel a stack; the
/// thresholds because nothing may be called: all is inlined, however large it is, where it is seldom run (`cold_path`)
/// and where it is often, too; `convergent` because before that LLVM copies a call, or moves it into a branch, unless
/// the function says that threads may meet in it. rustc marks every function so only since rust-lang/rust#153995.
const RUSTFLAGS: &[&str] = &[
    "-Ctarget-cpu={arch}",
    "-Ctarget-feature=+ptx81",
    "-Zmir-enable-passes=-JumpThreading",
    "-Zunstable-options",
    "-Cpanic=immediate-abort",
    "-Cllvm-args=-inline-threshold=100000000 -inline-cold-callsite-threshold=100000000 \
     -locally-hot-callsite-threshold=100000000 -force-attribute=convergent",
];

/// Threads of the entry's block, as `shared/src/launch.rs` has them: see [`with_directives`].
const LAUNCH_RS: &str = "shared/src/launch.rs";

fn main() -> ExitCode {
    for path in ["build.rs", "Cargo.lock", "device", "shared"] {
        println!("cargo:rerun-if-changed={path}");
    }
    for name in [DEVICE_RUSTC, PTXAS] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    let outcome = match Toolchain::find() {
        None => {
            println!(
                "cargo:warning=no device toolchain: this build has no GPU image. `./x setup` installs one, or `rustup \
                 component add rust-src`, or set {DEVICE_RUSTC} to a rustc that has its library source"
            );
            let none = |name: &str| fs::write(out.join(name), "None").map_err(|e| e.to_string());
            none("device_kernels.rs").and_then(|()| none("device_image.rs"))
        }
        Some(toolchain) => DeviceBuilder {
            path: root.join("device"),
            arch: "sm_90a",
            toolchain,
            target_dir: shared_target_dir(&out).join("ptx"),
            copy_to: out,
        }
        .build(),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("{why}");
            ExitCode::FAILURE
        }
    }
}

/// The outer build's `target`: `OUT_DIR` is `target/[triple/]profile/build/perpetua-hash/out`. The inner build's own
/// directory lies in it, one for all profiles, so that `core` is built once; cargo locks it against a second build.
///
/// Cargo marks a `target` that it has made, but not one that was there: `./x` keeps ptxas in it, before the first
/// build.
fn shared_target_dir(out: &Path) -> PathBuf {
    let is_target = |dir: &&Path| dir.join("CACHEDIR.TAG").is_file() || dir.join("ptxas").is_dir();
    let above_profile = out.ancestors().skip(4);
    above_profile.clone().take(2).find(is_target).or(above_profile.clone().next()).unwrap_or(out).to_path_buf()
}

/// A rustc and the words that describe it.
struct Toolchain {
    rustc: PathBuf,
    version: String,
}

impl Toolchain {
    /// The rustc named in the environment; else the one of this build, when rustup has put `core`'s source beside it;
    /// else Debian's (`rustc-web` with `rust-web-src`).
    fn find() -> Option<Toolchain> {
        if let Some(named) = env::var_os(DEVICE_RUSTC).filter(|name| !name.is_empty()) {
            let found = Toolchain::with_source(Path::new(&named));
            if found.is_none() {
                println!(
                    "cargo:warning={DEVICE_RUSTC} names {}, which does not run or has no library source beside it",
                    Path::new(&named).display()
                );
            }
            return found;
        }
        let current = env::var_os("RUSTC").map(PathBuf::from).unwrap_or_else(|| "rustc".into());
        Toolchain::with_source(&current).or_else(|| Toolchain::with_source(Path::new("/usr/bin/rustc")))
    }

    fn with_source(rustc: &Path) -> Option<Toolchain> {
        let output = Command::new(rustc).args(["--print", "sysroot"]).output().ok()?;
        let sysroot = PathBuf::from(String::from_utf8(output.stdout).ok()?.trim());
        let source = sysroot.join("lib/rustlib/src/rust/library/core");
        // Where rustup notes what it has installed: with the source this build would have an image.
        let components = sysroot.join("lib/rustlib/components");
        if components.is_file() {
            println!("cargo:rerun-if-changed={}", components.display());
        }
        let version = Command::new(rustc).arg("--version").output().ok()?;
        (output.status.success() && source.is_dir()).then(|| Toolchain {
            rustc: rustc.to_path_buf(),
            version: String::from_utf8_lossy(&version.stdout).trim().to_string(),
        })
    }
}

/// Builds a device crate to PTX.
struct DeviceBuilder {
    path: PathBuf,
    arch: &'static str,
    toolchain: Toolchain,
    target_dir: PathBuf,
    copy_to: PathBuf,
}

impl DeviceBuilder {
    fn build(&self) -> Result<(), String> {
        let ptxas = Ptxas::find(self.target_dir.parent());
        let made = thread::scope(|scope| {
            let threads = MODULES.map(|module| {
                let ptxas = ptxas.as_ref().filter(|_| module != "kernels");
                scope.spawn(move || self.module(module, ptxas))
            });
            threads.map(|thread| thread.join().expect("it does not panic"))
        });
        let [worker, operator, kernels] = made;
        let (worker, operator, kernels) = (worker?, operator?, kernels?);
        let built_with = format!(
            "{}; {}; {}; ptx fnv-1a {:016x}",
            self.toolchain.version,
            self.flags().join(" "),
            ptxas.as_ref().filter(|_| worker.cubin.is_some()).map_or("no ptxas", |ptxas| &ptxas.version),
            fnv1a([worker.ptx.as_bytes(), operator.ptx.as_bytes()].concat().as_slice()),
        );
        let [worker, operator] = [("worker", worker), ("operator", operator)].map(|(name, made)| {
            let (cubin, report) = match made.cubin {
                Some(Assembled { cubin, report }) => {
                    (format!("Some({})", self.embed(&format!("{name}.cubin"), &cubin)?), format!("Some({report:?})"))
                }
                None => ("None".to_owned(), "None".to_owned()),
            };
            let ptx = self.embed(&format!("{name}.ptx"), made.ptx.as_bytes())?;
            Ok::<_, String>(format!(
                "{name}: DeviceModule {{ entry: {:?}, ptx: {ptx}, cubin: {cubin}, ptxas_report: {report} }}",
                entry_of(name)
            ))
        });
        let image = format!("DeviceImage {{ {}, {}, built_with: {built_with:?} }}", worker?, operator?);
        let kernels = self.embed("kernels.ptx", kernels.ptx.as_bytes())?;
        write_if_new(&self.copy_to.join("device_kernels.rs"), format!("Some({kernels})\n").as_bytes())?;
        write_if_new(&self.copy_to.join("device_image.rs"), format!("Some({image})\n").as_bytes())
    }

    /// Module `module` as PTX and, with a ptxas, as machine code.
    fn module(&self, module: &str, ptxas: Option<&Ptxas>) -> Result<Made, String> {
        let target_dir = self.target_dir.join(module);
        let compiled = name_launch_blocks(&without_marks(&self.compile(module, &target_dir)?));
        let ptx = with_directives(&compiled, &entry_directives(&self.path)?)?;
        let cubin = ptxas.map(|ptxas| ptxas.assemble(&ptx, self.arch, &target_dir)).transpose()?.flatten();
        Ok(Made { ptx, cubin })
    }

    /// Writes `bytes` to the file `name`, and beside it deflated; the code of what is embedded of it.
    fn embed(&self, name: &str, bytes: &[u8]) -> Result<String, String> {
        write_if_new(&self.copy_to.join(name), bytes)?;
        let deflated = format!("{name}.z");
        write_if_new(&self.copy_to.join(&deflated), &compress_to_vec_zlib(bytes, 6))?;
        Ok(format!("Deflated::new(include_bytes!(concat!(env!(\"OUT_DIR\"), \"/{deflated}\")), {})", bytes.len()))
    }

    fn flags(&self) -> Vec<String> {
        RUSTFLAGS.iter().map(|flag| flag.replace("{arch}", self.arch)).collect()
    }

    /// The PTX as rustc writes it. `-Clinker=true` makes the link, which would have nothing to do, the program that
    /// does nothing; after fat LTO the assembly of the one codegen unit is the whole program.
    fn compile(&self, module: &str, target_dir: &Path) -> Result<String, String> {
        let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo
            .current_dir(&self.path)
            .args(["rustc", "--lib", "--crate-type", "cdylib", "--profile", "ptx"])
            .args(["--target", "nvptx64-nvidia-cuda", "-Zbuild-std=core", "-Zbuild-std-features="])
            .args(["--features", module, "--target-dir"])
            .arg(target_dir);
        if env::var("CARGO_NET_OFFLINE").is_ok_and(|offline| offline == "true") {
            cargo.arg("--offline");
        }
        cargo.args(["--", "--emit=asm", "-Clinker=true"]);
        // The outer build's flags, wrappers and target are its own; what cargo sets for build scripts would only make
        // the inner build's fingerprint differ from profile to profile.
        for (name, _) in env::vars_os() {
            let name = name.to_string_lossy().into_owned();
            let keep = ["CARGO", "CARGO_HOME", "CARGO_NET_OFFLINE", "RUSTUP_HOME", "RUSTUP_TOOLCHAIN"];
            let outer =
                ["CARGO", "RUST", "CLIPPY", "DEP_", "OUT_DIR", "TARGET", "HOST", "PROFILE", "OPT_LEVEL", "DEBUG"];
            let proxies = name.contains("REGISTR") || name.contains("HTTP") || name.contains("SOURCE");
            if outer.iter().any(|prefix| name.starts_with(prefix)) && !keep.contains(&name.as_str()) && !proxies {
                cargo.env_remove(&name);
            }
        }
        cargo
            .env("RUSTC", &self.toolchain.rustc)
            .env("RUSTC_BOOTSTRAP", "1")
            .env("CARGO_ENCODED_RUSTFLAGS", self.flags().join("\u{1f}"));
        let path = target_dir.join("nvptx64-nvidia-cuda/ptx/deps/perpetua_device.s");
        // What the linker would have written: as long as it is missing, cargo takes the crate for changed.
        let linked = path.with_extension("ptx");
        if !path.is_file() {
            let _ = fs::remove_file(&linked);
        }
        let output = cargo.output().map_err(|e| format!("{cargo:?}: {e}"))?;
        if !output.status.success() {
            return Err(format!(
                "the device crate does not compile with {} ({}):\n{}",
                self.toolchain.version,
                self.toolchain.rustc.display(),
                String::from_utf8_lossy(&output.stderr)
            ));
        }
        fs::write(&linked, []).map_err(|e| format!("{}: {e}", linked.display()))?;
        fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))
    }
}

/// What [`DeviceBuilder::module`] makes.
struct Made {
    ptx: String,
    cubin: Option<Assembled>,
}

/// Machine code, and what ptxas says of it: registers, spills.
struct Assembled {
    cubin: Vec<u8>,
    report: String,
}

/// The assembler, if there is one.
struct Ptxas {
    path: PathBuf,
    version: String,
}

impl Ptxas {
    /// The one that the environment names; that of `./x setup`, in `target`; else the one that a shell would find.
    fn find(target: Option<&Path>) -> Option<Ptxas> {
        let local = target.map(|target| target.join("ptxas/bin/ptxas")).unwrap_or_default();
        // A file that is missing would have cargo build anew every time; `./x setup` says when it has come.
        if local.is_file() {
            println!("cargo:rerun-if-changed={}", local.display());
        }
        let path = match env::var_os(PTXAS).filter(|name| !name.is_empty()) {
            Some(named) => PathBuf::from(named),
            None if local.is_file() => local,
            None => PathBuf::from("ptxas"),
        };
        let output = Command::new(&path).arg("--version").output().ok().filter(|output| output.status.success())?;
        let version = String::from_utf8_lossy(&output.stdout).trim().lines().last().unwrap_or_default().to_string();
        Some(Ptxas { path, version: format!("ptxas {version}") })
    }

    /// `ptx` as machine code, unless it is refused. What it made of the same PTX before, for whatever profile, is taken
    /// again: it takes a minute.
    fn assemble(&self, ptx: &str, arch: &str, target_dir: &Path) -> Result<Option<Assembled>, String> {
        let io = |path: &Path, e: io::Error| format!("{}: {e}", path.display());
        let made_of = fnv1a(&[ptx.as_bytes(), self.version.as_bytes(), arch.as_bytes()].concat());
        let cubins = target_dir.join("cubins");
        let [cubin, report] = ["cubin", "report"].map(|what| cubins.join(format!("{made_of:016x}.{what}")));
        if !cubin.is_file() || !report.is_file() {
            // Only the last ones are kept. They get their names when they are whole: builds of two profiles may run at
            // once.
            fs::create_dir_all(&cubins).map_err(|e| io(&cubins, e))?;
            let old = fs::read_dir(&cubins).map_err(|e| io(&cubins, e))?.flatten().map(|entry| entry.path());
            old.filter(|path| path.extension().is_some_and(|e| e == "cubin" || e == "report"))
                .filter(|path| *path != cubin && *path != report)
                .for_each(|path| drop(fs::remove_file(path)));
            let [source, unfinished, said] =
                ["ptx", "tmp", "said"].map(|what| cubins.join(format!("{}.{what}", std::process::id())));
            fs::write(&source, ptx).map_err(|e| io(&source, e))?;
            let output = Command::new(&self.path)
                .args(["-v", &format!("-arch={arch}")])
                .args([source.as_os_str(), "-o".as_ref(), unfinished.as_os_str()])
                .output()
                .map_err(|e| io(&self.path, e))?;
            let _ = fs::remove_file(&source);
            if !output.status.success() {
                println!(
                    "cargo:warning={} refuses the device PTX, so no cubin is embedded: {}",
                    self.path.display(),
                    String::from_utf8_lossy(&output.stderr).lines().next().unwrap_or("no reason given")
                );
                return Ok(None);
            }
            fs::write(&said, output.stderr).map_err(|e| io(&said, e))?;
            fs::rename(&said, &report).map_err(|e| io(&report, e))?;
            fs::rename(&unfinished, &cubin).map_err(|e| io(&cubin, e))?;
        }
        let report = fs::read_to_string(&report).map_err(|e| io(&report, e))?;
        Ok(Some(Assembled { cubin: fs::read(&cubin).map_err(|e| io(&cubin, e))?, report }))
    }
}

/// The entry of module `module` that a host launches.
fn entry_of(module: &str) -> String {
    format!("perpetua_{module}")
}

/// What the entry must promise about its launch, from the constant that the host launches with. Without both directives
/// ptxas would not know how many registers a thread may use. And that its loops stay loops: what LLVM has not unrolled
/// ptxas would, by four, for as many rounds as most of them never have, and an SM would have that code to fetch
/// (docs/cycles.md).
fn entry_directives(device: &Path) -> Result<String, String> {
    let path = device.join("..").join(LAUNCH_RS);
    let text = fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    let threads = text
        .split_once("pub const BLOCK_THREADS: u32 = ")
        .and_then(|(_, rest)| rest.split_once(';'))
        .ok_or_else(|| format!("{}: BLOCK_THREADS is not where build.rs expects it", path.display()))?
        .0;
    Ok(format!(".maxntid {threads}, 1, 1\n.minnctapersm 1\n.pragma \"nounroll\";\n"))
}

/// `ptx` with each entry's own first parameter where its body says `perpetua_launch_block`: assembly in Rust cannot
/// know which entry it ends up in.
fn name_launch_blocks(ptx: &str) -> String {
    let mut entries = ptx.split(".visible .entry ");
    let mut named = entries.next().unwrap_or_default().to_owned();
    for entry in entries {
        let name = entry.split('(').next().unwrap_or_default();
        named.push_str(".visible .entry ");
        named.push_str(&entry.replace("perpetua_launch_block", &format!("{name}_param_0")));
    }
    named
}

/// `ptx` without the comments that LLVM puts around each piece of inline assembly: an eighth of the text.
fn without_marks(ptx: &str) -> String {
    let is_mark = |line: &&str| matches!(line.trim(), "// begin inline asm" | "// end inline asm");
    ptx.lines().filter(|line| !is_mark(line)).flat_map(|line| [line, "\n"]).collect()
}

/// `ptx` with `directives` after the parameter list of each entry that runs tasks or bodies, all but probes: rustc has
/// no way to say them.
fn with_directives(ptx: &str, directives: &str) -> Result<String, String> {
    const START: &str = ".visible .entry ";
    let mut entries = ptx.split(START);
    let mut whole = entries.next().unwrap_or_default().to_owned();
    let mut patched = 0;
    for entry in entries {
        let body = entry.find("\n{").ok_or("an entry without a body")? + 1;
        let is_probe = entry.starts_with("perpetua_probe_");
        patched += usize::from(!is_probe);
        whole.extend([START, &entry[..body], if is_probe { "" } else { directives }, &entry[body..]]);
    }
    if patched == 0 { Err("the device crate's PTX has no entry".to_owned()) } else { Ok(whole) }
}

/// Leaves a file alone that already holds `contents`, so that nothing is rebuilt for its time stamp.
fn write_if_new(path: &Path, contents: &[u8]) -> Result<(), String> {
    let same = |old: io::Result<Vec<u8>>| old.is_ok_and(|old| old == contents);
    if same(fs::read(path)) {
        return Ok(());
    }
    fs::write(path, contents).map_err(|e| format!("{}: {e}", path.display()))
}

/// FNV-1a, 64 bits.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}
