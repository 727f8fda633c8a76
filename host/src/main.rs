//! The `perpetua` program: a thin user of the library.

mod cli;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "perpetua", version, about)]
struct Program {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Packs buffers with lifetimes into a capacity.
    Pack(cli::pack::Args),
    /// Schedules a plain graph under a memory capacity.
    Schedule(cli::schedule::Args),
}

fn main() -> std::process::ExitCode {
    let outcome = match Program::parse().verb {
        Verb::Pack(args) => cli::pack::run(&args),
        Verb::Schedule(args) => cli::schedule::run(&args),
    };
    match outcome {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("perpetua: {error}");
            std::process::ExitCode::FAILURE
        }
    }
}
