//! Builds a kernel graph of a few operators (a gated MLP with a norm before it and a residual around it), compiles it
//! into one image and runs it on resident workers.
//!
//! `cargo run --release --example custom_graph`

use perpetua::compile::Source;
use perpetua::device::kernels::linear::Activation;
use perpetua::engine::Resident;
use perpetua::graph::kernel::KernelGraph;
use perpetua::shared::control::ALL_ROWS;
use perpetua::shared::{DType, ProgramId};
use perpetua::{Device, EngineConfig, EngineError};
use std::collections::HashMap;
use std::sync::Arc;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let y = run(Device::Auto)?;
    println!("y[0, ..4] = {:?}", &y[..4]);
    Ok(())
}

/// y = x + down(silu(gate(h)) * up(h)), h = rms_norm(x). x, y: [4, 256].
fn run(device: Device) -> Result<Vec<f32>, EngineError> {
    let (rows, hidden, inner) = (4, 256, 640);
    let mut graph = KernelGraph::new();
    let build = |graph: &mut KernelGraph| {
        let x = graph.input("x", &[rows, hidden], DType::F32)?;
        let norm = graph.weight("norm", &[hidden], DType::F32)?;
        let gate = graph.weight("gate", &[inner, hidden], DType::F32)?;
        let up = graph.weight("up", &[inner, hidden], DType::F32)?;
        let down = graph.weight("down", &[hidden, inner], DType::F32)?;
        let h = graph.rms_norm("norm", x, norm, 1e-6)?;
        let gated = graph.gated_linear("gate_up", h, [gate, up], None, Activation::Silu)?;
        let y = graph.linear("down", gated, down, None, Activation::None, Some(x))?;
        graph.output("y", y)?;
        Ok(())
    };
    build(&mut graph).map_err(perpetua::compile::CompileError::Graph)?;

    // Any source of named bytes serves as a checkpoint.
    let values = |n: usize, scale: f32| -> Vec<u8> {
        (0..n).flat_map(|i| (scale * ((i * 37 % 101) as f32 / 50.0 - 1.0)).to_ne_bytes()).collect()
    };
    let weights = Arc::new(HashMap::from([
        ("norm".to_owned(), values(hidden, 1.0)),
        ("gate".to_owned(), values(inner * hidden, 0.1)),
        ("up".to_owned(), values(inner * hidden, 0.1)),
        ("down".to_owned(), values(hidden * inner, 0.1)),
    ]));
    let source = Source { name: "mlp".to_owned(), graph, in_token_loop: false };
    let mut resident = Resident::new(vec![source], &weights, &EngineConfig { device, ..EngineConfig::default() })?;
    resident.set_input("x", &values(rows * hidden, 1.0))?;
    resident.run_once(ProgramId(0), ALL_ROWS)?;
    let y = resident.output(ProgramId(0), "y").expect("declared above");
    Ok(resident.read_f32(&y, rows)?)
}

#[cfg(test)]
mod tests {
    use super::{Device, run};

    #[test]
    fn workers_compute_what_the_reference_does() {
        let expected = run(Device::Reference).expect("the reference runs");
        let found = run(Device::Cpu).expect("the workers run");
        let scale = expected.iter().fold(0.0f32, |max, x| max.max(x.abs()));
        for (e, f) in expected.iter().zip(&found) {
            assert!((e - f).abs() <= 1e-4 * scale, "{f}, expected {e}");
        }
    }
}
