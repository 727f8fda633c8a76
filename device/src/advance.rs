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

#[cfg(test)]
mod tests {
    use super::*;

    fn programs(rows: &[u32]) -> Vec<ProgramDesc> {
        let program = |rows: &u32| ProgramDesc { max_rows: *rows, in_token_loop: 1, ..bytemuck::Zeroable::zeroed() };
        rows.iter().map(program).collect()
    }

    /// Runs the loop without computing anything: every sampled token is `token`. Returns each pass's position and rows.
    fn passes(control: &mut Control, programs: &[ProgramDesc], token: u32) -> Vec<(u32, u32, u32)> {
        control.step = step_from(control, programs, 0, 0);
        let mut passes = Vec::new();
        while control.step.program != NO_PROGRAM {
            let step = control.step;
            assert_eq!(step.iteration, passes.len() as u32);
            assert!(step.rows <= programs[step.program as usize].max_rows);
            assert_eq!(step.program_runs, control.program_runs[step.program as usize]);
            passes.push((step.first_pos, step.rows, step.sampling));
            advance(control, programs, token);
        }
        passes
    }

    fn control(n_tokens: u32, max_new_tokens: u32, max_context: u32) -> Control {
        Control { n_tokens, max_new_tokens, max_context, ..bytemuck::Zeroable::zeroed() }
    }

    #[test]
    fn a_prompt_is_read_in_chunks_and_tokens_follow_one_by_one() {
        let programs = programs(&[1, 8, 32]);
        let mut control = control(75, 3, 100);
        let found = passes(&mut control, &programs, 9);
        // 75 = 32 + 32 + 11: the rest takes the smallest program that holds it.
        assert_eq!(found, [(0, 32, 0), (32, 32, 0), (64, 11, 1), (75, 1, 1), (76, 1, 1)]);
        assert_eq!((control.produced, control.n_tokens), (3, 78));
        assert_eq!(control.end, End::MaxTokens as u32);
        assert_eq!(control.program_runs[..3], [2, 0, 3]);
    }

    #[test]
    fn stop_tokens_the_context_and_the_host_end_it() {
        let programs = programs(&[1, 8]);
        let mut stopped = control(5, 100, 100);
        stopped.n_stop_tokens = 2;
        stopped.stop_tokens[1] = 9;
        assert_eq!(passes(&mut stopped, &programs, 9).len(), 1);
        assert_eq!(stopped.end, End::StopToken as u32);

        let mut full = control(5, 100, 8);
        let found = passes(&mut full, &programs, 9);
        // Positions 0..8 are computed; the token after the last is made but never read.
        assert_eq!(found.iter().map(|(_, rows, _)| rows).sum::<u32>(), 8);
        assert_eq!((full.end, full.n_tokens), (End::ContextFull as u32, 9));

        let mut told = Control { stop: 1, ..control(20, 100, 100) };
        assert_eq!(passes(&mut told, &programs, 9), [(0, 8, 0)]);
        assert_eq!(told.end, End::Stopped as u32);

        let mut reading = control(20, 0, 100);
        assert_eq!(passes(&mut reading, &programs, 9), [(0, 8, 0), (8, 8, 0), (16, 4, 0)]);
        assert_eq!(reading.end, End::PromptDone as u32);
    }

    #[test]
    fn nothing_to_do_or_nothing_to_do_it_with_ends_at_once() {
        assert_eq!(step_from(&control(0, 5, 10), &programs(&[4]), 0, 0).program, NO_PROGRAM);
        assert_eq!(step_from(&control(3, 5, 10), &[], 0, 0).program, NO_PROGRAM);
        let outside = ProgramDesc { in_token_loop: 0, ..programs(&[4])[0] };
        assert_eq!(choose_program(&[outside], 2), None);
    }
}
