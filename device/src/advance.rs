//! The token loop's turn: from the step that has just run to the next one.
//!
//! Pure integer logic over the control block, so that the macro kernel `advance`, the host (for a run's first step) and
//! the tests share it.

#[cfg(not(target_arch = "nvptx64"))]
use crate::lookup;
use perpetua_shared::TaskFlags;
use perpetua_shared::control::{Control, End, NO_PROGRAM, Request, Sequence, Step};
use perpetua_shared::image::{APART, EVERY_SEQUENCE, ProgramDesc, TOKEN_LOOP, VERIFIES};

/// The program for `pending` rows: the smallest that takes them all in one pass, else the largest there is.
/// `None` when the image has no program in the token loop.
pub fn choose_program(programs: &[ProgramDesc], pending: u32) -> Option<u32> {
    // Words that are always there, and no option: on a GPU one's would be held in registers over all bodies.
    let (mut best, mut rows) = (NO_PROGRAM, 0);
    for (at, program) in (0..).zip(programs) {
        let is_better = if rows < pending {
            program.max_rows > rows
        } else {
            program.max_rows >= pending && program.max_rows < rows
        };
        if program.kind == TOKEN_LOOP && (best == NO_PROGRAM || is_better) {
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
        sampling: u32::from(rows == pending && control.requests[0].max_new_tokens > 0),
        iteration,
        sequence: 0,
    }
}

/// The step that a task with `flags` sees in the pass `step`. One of a batch's sequence, which `sequences` gives, sees
/// that of the sequence alone: its next token, or no rows once it has ended. One of a row sees that row alone, or none
/// where the pass has fewer.
pub fn step_of(flags: u16, step: &Step, sequences: impl FnOnce(usize) -> Sequence) -> Step {
    if let Some(row) = TaskFlags::row(flags) {
        return Step { first_pos: step.first_pos + row, rows: u32::from(row < step.rows), ..*step };
    }
    let Some(number) = TaskFlags::sequence(flags) else { return *step };
    let sequence = sequences(number);
    let rows = u32::from(sequence.end == End::Running as u32);
    Step { first_pos: sequence.position, rows, sequence: number as u32, ..*step }
}

/// A batch's next step: while some prompt has tokens before its last to be read, as many of the first such prompt as
/// one pass takes; then the next token of every sequence that has not ended; then the end of the loop.
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
        // Rows beyond the last sequence that runs need not be computed. Each of the others' tasks sees its own
        // sequence's position.
        for (at, program) in (0..).zip(programs) {
            if program.kind == EVERY_SEQUENCE {
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

/// [`advance`] for a batch. `token` gives the token of a sequence at a position: asked for once, of each sequence that
/// has made one.
pub fn advance_batch(control: &mut Control, programs: &[ProgramDesc], token: impl Fn(usize, u32) -> u32) {
    let step = end_pass(control);
    if step.sampling == 0 {
        control.sequences[step.sequence as usize].position += step.rows;
    } else {
        for (number, sequence) in control.sequences[..control.n_sequences as usize].iter_mut().enumerate() {
            if sequence.end != End::Running as u32 {
                continue;
            }
            let token = token(number, sequence.n_tokens);
            sequence.position += 1;
            sequence.n_tokens += 1;
            sequence.produced += 1;
            control.produced += 1;
            let (request, stop_tokens) = (&control.requests[number], &control.stop_tokens);
            let end = end_of(request, stop_tokens, control.max_context, token, sequence.produced, sequence.position);
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
pub fn advance(control: &mut Control, programs: &[ProgramDesc], token: u32) {
    let step = end_pass(control);
    let next_pos = step.first_pos.wrapping_add(step.rows);
    let mut end = End::Running;
    if step.sampling != 0 {
        end = count(control, token, next_pos);
    } else if programs[step.program as usize].kind == APART || next_pos >= control.n_tokens {
        end = End::PromptDone;
    }
    go_on(control, programs, step, end);
}

/// [`advance`] after a pass that verified drafts, tokens guessed to follow the one its first row has read: of its
/// `rows` rows, one at least, row `i` gives the token `chosen(i)`, and row `i + 1` has read `draft(i)`. What a row
/// gives counts if all that the rows up to it have read is what it should have been: if the drafts before were chosen,
/// too. Returns how many count.
pub fn advance_verified(
    control: &mut Control,
    programs: &[ProgramDesc],
    rows: u32,
    chosen: impl Fn(u32) -> u32,
    draft: impl Fn(u32) -> u32,
) -> u32 {
    let step = end_pass(control);
    let mut made = 0;
    let end = loop {
        let token = chosen(made);
        made += 1;
        let end = count(control, token, step.first_pos + made);
        if end != End::Running || made >= rows || draft(made - 1) != token {
            break end;
        }
    };
    // As long as all are right, twice as many; where one was wrong, no more than came before it and one.
    let n_drafts = if made == rows { 2 * (made - 1) } else { made };
    control.n_drafts = n_drafts.min(control.max_drafts).max(1);
    go_on(control, programs, Step { rows: made, ..step }, end);
    made
}

/// The program by which the next pass may verify drafts, and how many of them, one at least; `None` where it reads
/// others than the last token, makes none, or nobody wants any.
pub fn room_for_drafts(control: &Control, programs: &[ProgramDesc]) -> Option<(u32, u32)> {
    let step = control.step;
    if control.max_drafts == 0 || step.program == NO_PROGRAM || step.rows != 1 || step.sampling != 1 {
        return None;
    }
    // Each but the last row gives one of the tokens that are still to be made, and has a place in the cache.
    let to_make = control.requests[0].max_new_tokens.saturating_sub(control.produced + 1);
    let places = control.max_context.saturating_sub(step.first_pos + 1);
    let (mut most, mut verifies) = (control.n_drafts.min(to_make).min(places), NO_PROGRAM);
    for (at, program) in (0..).zip(programs) {
        if program.kind == VERIFIES {
            (most, verifies) = (most.min(program.max_rows - 1), at);
        }
    }
    (verifies != NO_PROGRAM && most > 0).then_some((verifies, most))
}

/// Has the next pass, which would read one row, verify `n` drafts by `program`, as [`room_for_drafts`] has said.
pub fn verify_next(control: &mut Control, program: u32, n: u32) {
    control.step.program = program;
    control.step.program_runs = control.program_runs[program as usize];
    control.step.rows = 1 + n;
}

/// Has a next pass that would read the last of the text's tokens, which `token` gives, and no others, verify guesses
/// too: what followed when the text last went as it does now, handed to `put` with their positions. What is made does
/// not depend on them. (Prompt lookup decoding: Saxena 2023.)
#[cfg(not(target_arch = "nvptx64"))]
pub fn draft(
    control: &mut Control,
    programs: &[ProgramDesc],
    token: impl Fn(u32) -> u32,
    mut put: impl FnMut(u32, u32),
) {
    let Some((program, most)) = room_for_drafts(control, programs) else { return };
    let Some(first) = lookup::continuation(control.n_tokens, &token) else { return };
    // What follows may reach into what is being put.
    (0..most).for_each(|i| put(control.n_tokens + i, token(first + i)));
    verify_next(control, program, most);
}

/// Counts the pass that has ended, and gives its step.
fn end_pass(control: &mut Control) -> Step {
    let step = control.step;
    let runs = &mut control.program_runs[step.program as usize];
    *runs = runs.wrapping_add(1);
    control.last_program = step.program;
    step
}

/// Counts `token`, made by the pass that has read all before `next_pos`: what it ends the loop with.
fn count(control: &mut Control, token: u32, next_pos: u32) -> End {
    control.n_tokens += 1;
    control.produced += 1;
    end_of(&control.requests[0], &control.stop_tokens, control.max_context, token, control.produced, next_pos)
}

/// How a sequence ends, of which `request` is asked, that has made `token` as its `produced`th and read all before
/// `next_pos`; the bits of [`Request::stops`] stand for `stop_tokens`.
pub fn end_of(
    request: &Request,
    stop_tokens: &[u32],
    max_context: u32,
    token: u32,
    produced: u32,
    next_pos: u32,
) -> End {
    let (mut is_stop, mut left) = (false, request.stops);
    while left != 0 {
        is_stop |= stop_tokens.get(left.trailing_zeros() as usize) == Some(&token);
        left &= left - 1;
    }
    if is_stop {
        End::StopToken
    } else if produced >= request.max_new_tokens {
        End::MaxTokens
    } else if next_pos >= max_context {
        End::ContextFull
    } else {
        End::Running
    }
}

/// Sets the step after `step`, or, where there is an `end` or the host wants one, none.
fn go_on(control: &mut Control, programs: &[ProgramDesc], step: Step, mut end: End) {
    if end == End::Running && control.stop != 0 {
        end = End::Stopped;
    }
    control.end = end as u32;
    let (next_pos, iteration) = (step.first_pos.wrapping_add(step.rows), step.iteration.wrapping_add(1));
    control.step = if end == End::Running {
        step_from(control, programs, next_pos, iteration)
    } else {
        Step { program: NO_PROGRAM, first_pos: next_pos, iteration, ..step }
    };
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn programs(rows: &[u32]) -> Vec<ProgramDesc> {
        let program = |rows: &u32| ProgramDesc { max_rows: *rows, kind: TOKEN_LOOP, ..bytemuck::Zeroable::zeroed() };
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
        let requests = [Request::greedy(max_new_tokens); _];
        Control { n_tokens, max_context, requests, ..bytemuck::Zeroable::zeroed() }
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
        stopped.requests[0].stops = 0b10;
        stopped.stop_tokens = [8; _];
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
        programs[2].kind = EVERY_SEQUENCE;
        programs
    }

    #[test]
    fn a_batch_reads_its_prompts_one_by_one_and_goes_on_together() {
        let mut control = control(0, 4, 12);
        control.requests[1].stops = 1;
        control.stop_tokens[0] = 7;
        let found = batch(&mut control, &batch_programs(), &[11, 2, 1], 9);
        // The last token of each prompt is left to the passes together; the one of a single token has no other.
        let reading = [(0, 0, 8, 0), (0, 8, 2, 0), (1, 0, 1, 0)];
        assert_eq!(found[..3], reading);
        // Sequence 0, the furthest, fills its context first, the stop token ends 1, 2 makes all of its tokens: rows
        // stay until it ends.
        assert_eq!(found[3..], [10, 11, 3, 3].map(|furthest| (0, furthest, 3, 1)));
        let ends: Vec<u32> = control.sequences[..3].iter().map(|sequence| sequence.end).collect();
        assert_eq!(ends, [End::ContextFull, End::StopToken, End::MaxTokens].map(|end| end as u32));
        assert_eq!(control.sequences.map(|sequence| sequence.produced)[..3], [2, 3, 4]);
        assert_eq!((control.end, control.produced), (End::MaxTokens as u32, 9));
        // Positions 10 and 11 of sequence 0 are computed; the token after the last is made but never read.
        assert_eq!((control.sequences[0].position, control.sequences[0].n_tokens), (12, 13));

        // Rows end with the last sequence that runs.
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

    /// Runs the loop over a model that has `next` follow the tokens so far, drafts included. Returns the text, and each
    /// pass's position and rows.
    fn text_of(control: &mut Control, prompt: &[u32], next: impl Fn(&[u32]) -> u32) -> (Vec<u32>, Vec<(u32, u32)>) {
        let mut programs = programs(&[1, 8, 5]);
        programs[2].kind = VERIFIES;
        let text = core::cell::RefCell::new(prompt.to_vec());
        text.borrow_mut().resize(control.max_context as usize + 1, u32::MAX);
        control.n_tokens = prompt.len() as u32;
        control.step = step_from(control, &programs, 0, 0);
        let mut passes = Vec::new();
        while control.step.program != NO_PROGRAM {
            let step = control.step;
            passes.push((step.first_pos, step.rows));
            let at = step.first_pos as usize + 1;
            assert!(at - 1 + step.rows as usize <= control.max_context as usize, "a row without a place in the cache");
            let chosen: Vec<u32> = (0..step.rows as usize).map(|row| next(&text.borrow()[..at + row])).collect();
            if programs[step.program as usize].kind == VERIFIES {
                let (chosen, drafts) = (|row| chosen[row as usize], |row| text.borrow()[at + row as usize]);
                let made = advance_verified(control, &programs, step.rows, chosen, drafts);
                (0..made).for_each(|row| text.borrow_mut()[at + row as usize] = chosen(row));
            } else {
                let token = *chosen.last().expect("a pass has rows");
                if step.sampling == 1 {
                    text.borrow_mut()[at + chosen.len() - 1] = token;
                }
                advance(control, &programs, token);
            }
            assert_eq!(control.last_program, step.program);
            let token = |at: u32| text.borrow()[at as usize];
            draft(control, &programs, token, |at, token| text.borrow_mut()[at as usize] = token);
        }
        let mut text = text.into_inner();
        text.truncate(control.n_tokens as usize);
        (text, passes)
    }

    proptest! {
        /// Whatever follows what, wherever it ends: the text is that of passes of one row, in no more passes.
        #[test]
        fn guesses_change_nothing_but_the_passes(
            prompt in proptest::collection::vec(0u32..4, 1..30),
            rule in any::<u32>(),
            max_drafts in 1u32..9,
            max_new_tokens in 1u32..40,
            room in 0u32..40,
            stop in 0u32..8,
        ) {
            // The next token by the last two, and now and then by the length, so that guesses are right for a while.
            let next = |text: &[u32]| {
                let last = text.iter().rev().take(2).fold(0, |sum, token| sum * 4 + token.min(&3));
                let salt = if text.len().is_multiple_of(7) { text.len() as u32 } else { 0 };
                (rule >> ((2 * last) & 31)).wrapping_add(salt) % 4
            };
            let max_context = prompt.len() as u32 + room;
            let mut plain = Control { stop_tokens: [stop; _], ..control(0, max_new_tokens, max_context) };
            plain.requests[0].stops = 1;
            let mut guessing = Control { max_drafts, n_drafts: max_drafts, ..plain };
            let (expected, one_by_one) = text_of(&mut plain, &prompt, next);
            let (found, passes) = text_of(&mut guessing, &prompt, next);
            prop_assert_eq!(found, expected);
            prop_assert!(passes.len() <= one_by_one.len(), "{:?}", passes);
            prop_assert!(passes.iter().all(|(_, rows)| *rows <= 8));
            prop_assert_eq!((guessing.end, guessing.produced), (plain.end, plain.produced));
            prop_assert_eq!((guessing.n_tokens, guessing.step.first_pos), (plain.n_tokens, plain.step.first_pos));
        }
    }

    #[test]
    fn guesses_grow_while_they_are_right() {
        let mut control = Control { max_drafts: 4, n_drafts: 1, ..control(0, 16, 100) };
        // 1 2 3 1 2 3 ..., until at position 20 something else follows.
        let next = |text: &[u32]| if text.len() == 20 { 9 } else { text.last().expect("a prompt") % 3 + 1 };
        let (text, passes) = text_of(&mut control, &[1, 2, 3, 1, 2], next);
        assert_eq!(text[..8], [1, 2, 3, 1, 2, 3, 1, 2]);
        assert_eq!(text.len(), 21);
        // A draft, two, four; then the one that is wrong, and what its row gives ends the text.
        assert_eq!(passes, [(0, 5), (5, 2), (7, 3), (10, 5), (15, 5), (20, 1)][..5]);
    }

    #[test]
    fn a_task_of_a_row_sees_it_alone() {
        let pass = Step { first_pos: 17, rows: 3, sampling: 1, iteration: 5, ..Step::default() };
        for (row, rows) in [(0, 1), (2, 1), (3, 0), (15, 0)] {
            let seen = step_of(TaskFlags::of_row(row) | TaskFlags::ONLY_WHEN_SAMPLING, &pass, |_| {
                unreachable!("none is named")
            });
            assert_eq!(seen, Step { first_pos: 17 + row as u32, rows, ..pass });
        }
        assert_eq!(
            (TaskFlags::row(TaskFlags::of_sequence(63)), TaskFlags::sequence(TaskFlags::of_row(15))),
            (None, None)
        );
        assert_eq!(TaskFlags::row(TaskFlags::ONLY_WHEN_SAMPLING | TaskFlags::JUST_IN_TIME), None);
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
        let outside = ProgramDesc { kind: APART, ..programs(&[4])[0] };
        assert_eq!(choose_program(&[outside], 2), None);
    }
}
