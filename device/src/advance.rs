//! The token loop's turn: from the step that has just run to the next one.
//!
//! Pure integer logic over the control block, so that the macro kernel `advance`, the host (for a run's first step) and
//! the tests share it.

use perpetua_shared::control::{Control, End, NO_PROGRAM, Step};
use perpetua_shared::image::ProgramDesc;

/// The program for `pending` rows: the smallest that takes them all in one pass, else the largest there is.
/// `None` when the image has no program in the token loop.
pub fn choose_program(programs: &[ProgramDesc], pending: u32) -> Option<u32> {
    let mut best: Option<(u32, u32)> = None;
    for (at, program) in programs.iter().enumerate() {
        if program.in_token_loop == 0 {
            continue;
        }
        let better = match best {
            None => true,
            Some((_, rows)) if rows < pending => program.max_rows > rows,
            Some((_, rows)) => program.max_rows >= pending && program.max_rows < rows,
        };
        if better {
            best = Some((at as u32, program.max_rows));
        }
    }
    best.map(|(at, _)| at)
}

/// The step that computes the rows from `first_pos` to the last known token, or as many as one pass takes.
/// With no program for it the step ends the loop.
pub fn step_from(control: &Control, programs: &[ProgramDesc], first_pos: u32, iteration: u32) -> Step {
    let pending = control.n_tokens.saturating_sub(first_pos);
    let Some(program) = choose_program(programs, pending).filter(|_| pending > 0) else {
        return Step { program: NO_PROGRAM, iteration, ..control.step };
    };
    let rows = pending.min(programs[program as usize].max_rows);
    Step {
        program,
        program_runs: control.program_runs[program as usize],
        first_pos,
        rows,
        sampling: u32::from(rows == pending && control.max_new_tokens > 0),
        iteration,
    }
}

/// Ends the iteration that `control.step` describes: counts the token that the sampler appended as `token` (if the pass
/// sampled), decides whether the loop goes on, and sets the next step.
#[inline]
pub fn advance(control: &mut Control, programs: &[ProgramDesc], token: u32) {
    let step = control.step;
    control.program_runs[step.program as usize] = control.program_runs[step.program as usize].wrapping_add(1);
    let iteration = step.iteration.wrapping_add(1);
    let next_pos = step.first_pos.wrapping_add(step.rows);
    let mut end = End::Running;
    if step.sampling != 0 {
        control.n_tokens += 1;
        control.produced += 1;
        if control.stop_tokens[..control.n_stop_tokens as usize].contains(&token) {
            end = End::StopToken;
        } else if control.produced >= control.max_new_tokens {
            end = End::MaxTokens;
        } else if next_pos >= control.max_context {
            end = End::ContextFull;
        }
    } else if programs[step.program as usize].in_token_loop == 0 || next_pos >= control.n_tokens {
        end = End::PromptDone;
    }
    if end == End::Running && control.stop != 0 {
        end = End::Stopped;
    }
    control.end = end as u32;
    control.step = if end == End::Running {
        step_from(control, programs, next_pos, iteration)
    } else {
        Step { program: NO_PROGRAM, first_pos: next_pos, iteration, ..step }
    };
}
