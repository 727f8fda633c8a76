//! The CPU body of `gated_linear`.

use super::*;

pub(super) fn run(p: &Params, call: &Call<'_>, _: &mut Scratch) -> Result<(), Fault> {
    GatedLinear::reference(p, call)
}
