//! experts[r, s] = the expert that row r goes to through slot s, weights[r, s] = how much it counts: what [`routing`]
//! finds out of a row's logits. logits: [rows, experts] f32; correction: [experts]; experts: [rows, slots] i32;
//! weights: [rows, slots] f32. In passes of several rows, whose tasks [multiply](super::RoutedLinear) all of an
//! expert's rows together, and would each have to choose for every row. (MPK: `MOE_TOPK_SOFTMAX`, `MOE_TOPK_SIGMOID`.)

#[cfg(not(target_arch = "nvptx64"))]
use super::routing;
use super::routing::{Counting, Found};
use super::*;
use crate::arch::memory;
#[cfg(not(target_arch = "nvptx64"))]
use perpetua_shared::DType;

/// See the module head.
#[derive(Debug)]
pub struct ExpertRoutes;

/// Parameters.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Params {
    /// How much experts count.
    pub counting: Counting,
}

slots! {
    LOGITS: read "logits",
    EXPERTS: write "experts",
    WEIGHTS: write "weights",
    CORRECTION: optional "correction",
}

impl MacroKernel for ExpertRoutes {
    const NAME: &'static str = "expert_routes";
    const SLOTS: &'static [Slot] = slot::ALL;
    type Params = Params;

    #[cfg(not(target_arch = "nvptx64"))]
    fn check(p: &Params, io: &[Operand]) -> Result<(), Violation> {
        let [logits, experts, weights, correction] = io else { unreachable!("slots were counted") };
        p.counting.check()?;
        let [rows, chosen, ..] = experts.extent;
        routing::check(logits, correction, rows, chosen)?;
        for (name, operand, dtype) in [("experts", experts, DType::I32), ("weights", weights, DType::F32)] {
            rules::dtype(name, operand, &[dtype])?;
            rules::rank(name, operand, 2)?;
        }
        rules::extent("weights", weights, 0, rows)?;
        rules::extent("weights", weights, 1, chosen)
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn reference(p: &Params, call: &Call<'_>) -> Result<(), Fault> {
        let [logits, experts, weights, correction] = core::array::from_fn(|i| call.tensor(i));
        let mut routes = Vec::new();
        let router = routing::Router { logits, correction, counting: p.counting };
        router.routes(call.rows(slot::LOGITS), experts.extent(1), &mut routes);
        for routing::Route { expert, row, slot, weight } in routes {
            experts.set_i32([row, slot], expert as i32);
            weights.set([row, slot], weight);
        }
        Ok(())
    }

    unsafe fn gpu(p: &Params, call: &gpu::Call<'_>, block: &Block) -> Result<(), Fault> {
        // SAFETY: the operands are the slots', and every index is below its extent; what was found is read before the
        // barrier behind which the next row's is.
        unsafe {
            let (rows, chosen) = (call.rows(&call.tensor(slot::LOGITS)), call.tensor(slot::EXPERTS).extent(1));
            let mut r = 0;
            while r < rows {
                let found = Found::choose::<true>(call, block, [slot::LOGITS, slot::CORRECTION], r, chosen, p.counting);
                for slot in block.mine(chosen) {
                    let expert = call.tensor(slot::EXPERTS).address([r, slot]).cast::<u32>();
                    memory::store(expert, found.expert(slot));
                    call.tensor(slot::WEIGHTS).set([r, slot], found.weight(slot));
                }
                block.sync();
                r += 1;
            }
        }
        Ok(())
    }
}
