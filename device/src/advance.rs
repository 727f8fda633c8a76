//! The token loop's turn: from the step that has just run to the next one.
//!
//! Pure integer logic over the control block, so that the macro kernel `advance`, the host (for a run's first step) and
//! the tests share it.

use perpetua_shared::TaskFlags;
use perpetua_shared::control::{Control, End, NO_PROGRAM, Sequence, Step};
use perpetua_shared::image::{EVERY_SEQUENCE, ProgramDesc};

/// The program for `pending` rows: the smallest that takes them all in one pass, else the largest there is.
/// `None` when the image has no program in the token loop.
#[inline(always)]
pub fn choose_program(programs: &[ProgramDesc], pending: u32) -> Option<u32> {
    // Words that are always there, and no option: on a GPU one's would be held in registers over all bodies.
    let (mut best, mut rows) = (NO_PROGRAM, 0);
    for (at, program) in (0..).zip(programs) {
        let is_better = if rows < pending {
            program.max_rows > rows
        } else {
            program.max_rows >= pending && program.max_rows < rows
        };
        if program.in_token_loop == 1 && (best == NO_PROGRAM || is_better) {
            (best, rows) = (at, program.max_rows);
        }
    }
    (best != NO_PROGRAM).then_some(best)
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
        sequence: 0,
    }
}

/// The step that a task with `flags` sees in the pass `step`. One of a batch's sequence, which `sequences` gives, sees that
/// of the sequence alone: its next token, or no rows once it has ended.
#[inline(always)]
pub fn step_of(flags: u16, step: &Step, sequences: impl FnOnce(usize) -> Sequence) -> Step {
    let Some(number) = TaskFlags::sequence(flags) else { return *step };
    let sequence = sequences(number);
    let rows = u32::from(sequence.end == End::Running as u32);
    Step { first_pos: sequence.position, rows, sequence: number as u32, ..*step }
}

/// A batch's next step: while some prompt has tokens before its last to be read, as many of the first such prompt as one
/// pass takes; then the next token of every sequence that has not ended; then the end of the loop.
#[inline(always)]
pub fn batch_step(control: &Control, programs: &[ProgramDesc], iteration: u32) -> Step {
    // The first sequence with tokens to be read, one more than the last that runs, and where the one furthest on is.
    let (n, mut unread, mut end, mut furthest) = (control.n_sequences, control.n_sequences, 0, 0);
    for number in (0..n).rev() {
        let sequence = &control.sequences[number as usize];
        if sequence.end == End::Running as u32 {
            end = if end == 0 { number + 1 } else { end };
            furthest = if sequence.position > furthest { sequence.position } else { furthest };
            unread = if before_last(sequence) > 0 { number } else { unread };
        }
    }
    let mut step = Step { program: NO_PROGRAM, iteration, ..control.step };
    if unread < n {
        let sequence = &control.sequences[unread as usize];
        let pending = before_last(sequence);
        if let Some(program) = choose_program(programs, pending) {
            let rows = pending.min(programs[program as usize].max_rows);
            step = Step { program, first_pos: sequence.position, rows, sampling: 0, sequence: unread, ..step };
        }
    } else if end > 0 {
        // Rows beyond the last sequence that runs need not be computed. Each of the others' tasks sees its own sequence's position.
        for (at, program) in (0..).zip(programs) {
            if program.in_token_loop == EVERY_SEQUENCE {
                step = Step { program: at, first_pos: furthest, rows: end, sampling: 1, sequence: 0, ..step };
            }
        }
    }
    if step.program != NO_PROGRAM {
        step.program_runs = control.program_runs[step.program as usize];
    }
    step
}

/// Tokens of `sequence` that are to be read before its last.
fn before_last(sequence: &Sequence) -> u32 {
    sequence.n_tokens.saturating_sub(sequence.position + 1)
}

/// [`advance`] for a batch. `token` gives the token of a sequence at a position: asked for once, of each sequence that has made one.
#[inline(always)]
pub fn advance_batch(control: &mut Control, programs: &[ProgramDesc], token: impl Fn(usize, u32) -> u32) {
    let step = control.step;
    control.program_runs[step.program as usize] = control.program_runs[step.program as usize].wrapping_add(1);
    if step.sampling == 0 {
        control.sequences[step.sequence as usize].position += step.rows;
    } else {
        let stops = &control.stop_tokens[..control.n_stop_tokens as usize];
        for (number, sequence) in control.sequences[..control.n_sequences as usize].iter_mut().enumerate() {
            if sequence.end != End::Running as u32 {
                continue;
            }
            let token = token(number, sequence.n_tokens);
            sequence.position += 1;
            sequence.n_tokens += 1;
            sequence.produced += 1;
            control.produced += 1;
            let end = if stops.contains(&token) {
                End::StopToken
            } else if sequence.produced >= control.max_new_tokens {
                End::MaxTokens
            } else if sequence.position >= control.max_context {
                End::ContextFull
            } else {
                End::Running
            };
            sequence.end = end as u32;
            control.end = end as u32;
        }
    }
    if control.stop != 0 {
        let sequences = control.sequences[..control.n_sequences as usize].iter_mut();
        for sequence in sequences.filter(|sequence| sequence.end == End::Running as u32) {
            (sequence.end, control.end) = (End::Stopped as u32, End::Stopped as u32);
        }
    }
    control.step = batch_step(control, programs, step.iteration.wrapping_add(1));
    if control.step.program != NO_PROGRAM {
        control.end = End::Running as u32;
    }
}

/// Ends the iteration that `control.step` describes: counts the token that the sampler appended as `token` (if the pass
/// sampled), decides whether the loop goes on, and sets the next step.
// Every entry of the GPU's code has it; a call would cost each of them a stack.
#[inline(always)]
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

    /// As [`passes`], for a batch over `prompts`, every sampled token `token` but sequence 1's third, which is 7.
    fn batch(
        control: &mut Control,
        programs: &[ProgramDesc],
        prompts: &[u32],
        token: u32,
    ) -> Vec<(u32, u32, u32, u32)> {
        control.n_sequences = prompts.len() as u32;
        for (sequence, n_tokens) in control.sequences.iter_mut().zip(prompts) {
            sequence.n_tokens = *n_tokens;
        }
        control.step = batch_step(control, programs, 0);
        let mut passes = Vec::new();
        while control.step.program != NO_PROGRAM {
            let step = control.step;
            assert_eq!((step.iteration, control.end), (passes.len() as u32, End::Running as u32));
            assert_eq!(step.program_runs, control.program_runs[step.program as usize]);
            passes.push((step.sequence, step.first_pos, step.rows, step.sampling));
            let known = control.sequences;
            advance_batch(control, programs, |number, position| {
                assert_eq!((known[number].end, position), (End::Running as u32, known[number].n_tokens));
                if (number, known[number].produced) == (1, 2) { 7 } else { token }
            });
        }
        let made: u32 = control.sequences.iter().map(|sequence| sequence.produced).sum();
        assert_eq!(made, control.produced);
        passes
    }

    fn batch_programs() -> Vec<ProgramDesc> {
        let mut programs = programs(&[1, 8, 4]);
        programs[2].in_token_loop = EVERY_SEQUENCE;
        programs
    }

    #[test]
    fn a_batch_reads_its_prompts_one_by_one_and_goes_on_together() {
        let mut control = Control { n_stop_tokens: 1, ..control(0, 4, 12) };
        control.stop_tokens[0] = 7;
        let found = batch(&mut control, &batch_programs(), &[11, 2, 1], 9);
        // The last token of each prompt is left to the passes together; the one of a single token has no other.
        let reading = [(0, 0, 8, 0), (0, 8, 2, 0), (1, 0, 1, 0)];
        assert_eq!(found[..3], reading);
        // Sequence 0, the furthest, fills its context first, the stop token ends 1, 2 makes all of its tokens: rows stay until it ends.
        assert_eq!(found[3..], [10, 11, 3, 3].map(|furthest| (0, furthest, 3, 1)));
        let ends: Vec<u32> = control.sequences[..3].iter().map(|sequence| sequence.end).collect();
        assert_eq!(ends, [End::ContextFull, End::StopToken, End::MaxTokens].map(|end| end as u32));
        assert_eq!(control.sequences.map(|sequence| sequence.produced)[..3], [2, 3, 4]);
        assert_eq!((control.end, control.produced), (End::MaxTokens as u32, 9));
        // Positions 10 and 11 of sequence 0 are computed; the token after the last is made but never read.
        assert_eq!((control.sequences[0].position, control.sequences[0].n_tokens), (12, 13));

        // Rows end with the last sequence that runs.
        let mut control = Control { n_stop_tokens: 1, ..control };
        (control.produced, control.end, control.sequences) = (0, 0, [Sequence::default(); _]);
        control.program_runs = Default::default();
        control.max_context = 100;
        let found = batch(&mut control, &batch_programs(), &[1, 1], 9);
        assert_eq!(found, [(0, 0, 2, 1), (0, 1, 2, 1), (0, 2, 2, 1), (0, 3, 1, 1)]);
    }

    #[test]
    fn a_batch_told_to_stop_ends_every_sequence() {
        let mut told = Control { stop: 1, ..control(0, 100, 100) };
        assert_eq!(batch(&mut told, &batch_programs(), &[20, 3], 9), [(0, 0, 8, 0)]);
        assert_eq!(told.end, End::Stopped as u32);
        assert!(told.sequences[..2].iter().all(|sequence| sequence.end == End::Stopped as u32));
        // Without a program for them there is nothing to run.
        assert_eq!(batch(&mut control(0, 5, 10), &programs(&[1, 8]), &[1, 1], 9), []);
    }

    #[test]
    fn a_task_of_a_sequence_sees_its_step() {
        let pass = Step { rows: 3, sampling: 1, iteration: 5, ..Step::default() };
        let state = |end: End| Sequence { position: 17, end: end as u32, ..Sequence::default() };
        assert_eq!(step_of(TaskFlags::ONLY_WHEN_SAMPLING, &pass, |_| unreachable!("none is named")), pass);
        for (end, rows) in [(End::Running, 1), (End::StopToken, 0)] {
            let seen = step_of(TaskFlags::of_sequence(2) | TaskFlags::ONLY_WHEN_SAMPLING, &pass, |number| {
                assert_eq!(number, 2);
                state(end)
            });
            assert_eq!(seen, Step { first_pos: 17, rows, sequence: 2, ..pass });
        }
    }

    #[test]
    fn nothing_to_do_or_nothing_to_do_it_with_ends_at_once() {
        assert_eq!(step_from(&control(0, 5, 10), &programs(&[4]), 0, 0).program, NO_PROGRAM);
        assert_eq!(step_from(&control(3, 5, 10), &[], 0, 0).program, NO_PROGRAM);
        let outside = ProgramDesc { in_token_loop: 0, ..programs(&[4])[0] };
        assert_eq!(choose_program(&[outside], 2), None);
    }
}
