//! The `perpetua` program: a thin user of the library, one file per verb.

#![deny(unsafe_code)]

mod cli;

fn main() -> std::process::ExitCode {
    cli::main()
}
