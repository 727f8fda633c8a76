//! Sequences that are decoded together: every pass over the weights makes a token for each. They come and go one by
//! one.
//!
//! What decides about tokens is in the control block, which workers read, so it is written between runs alone: whoever
//! joins has the run under way end after its pass, and another goes on from there. What a run ends with is what the
//! next begins with, so that nothing is read or made twice, and a sequence's tokens do not depend on who came or went
//! meanwhile.
//!
//! How a sequence ends the host finds out by itself, from the tokens it takes: workers end it by the same rules in the
//! same pass.

use super::generation::{Made, Run};
use super::resident::{Resident, reusable};
use super::text::Text;
use super::{EngineError, GenerateOptions, Model, Token, check_prompt, check_stop_tokens, request};
use crate::exec::{RunError, Stopper};
use perpetua_device::advance::{batch_step, end_of};
use perpetua_shared::control::{Control, End, Request, Sequence};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Several sequences under way: iterate over `(sequence, token)`. Each sequence's tokens come in order.
///
/// Others can join at any time ([`BatchGeneration::add`]), so an iterator that has given `None` may go on.
#[derive(Debug)]
pub struct BatchGeneration<'a> {
    model: &'a Model,
    /// Positions of each cache.
    context: usize,
    pub(super) run: Run<'a>,
    /// Of all runs there will be.
    stopper: Stopper,
    /// The caches.
    slots: Vec<Slot<'a>>,
    /// Of every sequence that there has been, by its number.
    all: Vec<Past>,
    /// Taken from the run, and not given out yet.
    ready: VecDeque<(usize, Token)>,
}

/// What is kept of a sequence.
#[derive(Clone, Copy, Debug)]
struct Past {
    /// Why it has ended.
    end: Option<End>,
    reused: usize,
}

/// A cache, and the tokens that belong to it.
#[derive(Debug, Default)]
struct Slot<'a> {
    followed: Option<Followed<'a>>,
    /// Tokens whose keys and values it has, while no sequence does.
    cached: usize,
    /// How the one that had it when the run began has ended, if there was one and it has.
    end: Option<End>,
}

/// What is asked of a sequence in all.
#[derive(Debug)]
pub(super) struct Asked {
    request: Request,
    /// What its `stops` stand for, before they share a control block's with those of others.
    stop_tokens: Vec<u32>,
    stop_strings: Vec<String>,
    deadline: Option<Instant>,
    reuse_prefix: bool,
}

/// A sequence under way.
#[derive(Debug)]
struct Followed<'a> {
    number: usize,
    made: Made<'a>,
    asked: Asked,
    prompt_len: usize,
    /// Tokens taken so far.
    n_made: usize,
    /// How far it was when the run began, or the last one ended.
    known: Sequence,
}

impl Followed<'_> {
    /// How it has ended with the last token taken, if it has.
    fn end(&self, context: usize) -> Option<End> {
        let (token, Asked { request, stop_tokens, .. }) = (self.made.last?, &self.asked);
        let end = end_of(request, stop_tokens, context as u32, token, self.n_made as u32, self.cached() as u32);
        (end != End::Running).then_some(end)
    }

    /// Tokens in its cache: all but the last one, once there is one that it has made.
    fn cached(&self) -> usize {
        match self.n_made {
            0 => self.known.position as usize,
            made => self.prompt_len + made - 1,
        }
    }
}

impl<'a> BatchGeneration<'a> {
    /// Nothing yet, with a cache for each of `sequences`.
    pub(super) fn new(model: &'a Model, resident: &'a mut Resident, context: usize, sequences: usize) -> Self {
        BatchGeneration {
            model,
            context,
            run: Run::none(resident),
            stopper: Stopper::default(),
            slots: (0..sequences).map(|_| Slot::default()).collect(),
            all: Vec::new(),
            ready: VecDeque::new(),
        }
    }

    /// Another sequence, which joins those under way: they wait while its prompt is read, and go on with the tokens
    /// that they would have made without it. Returns its number; they count up from 0. With
    /// [`GenerateOptions::reuse_prefix`] it gets the free cache that has most of its prompt; of several as good, the
    /// one that others have left least in.
    ///
    /// ```no_run
    /// # use perpetua::{Engine, EngineConfig, GenerateOptions, Model};
    /// # let model = Model::load("path/to/Qwen3-0.6B")?;
    /// let mut engine = Engine::new(&model, &EngineConfig { sequences: Some(2), ..EngineConfig::default() })?;
    /// let mut batch = engine.batch()?;
    /// batch.add(&model.encode("A cat is")?, &GenerateOptions::default())?;
    /// let mut later = Some(model.encode("A dog is")?);
    /// while let Some((sequence, token)) = batch.next().transpose()? {
    ///     println!("{sequence}: {}", token.text);
    ///     if let Some(prompt) = later.take() {
    ///         batch.add(&prompt, &GenerateOptions { temperature: 0.7, ..GenerateOptions::default() })?;
    ///     }
    /// }
    /// # Ok::<(), perpetua::EngineError>(())
    /// ```
    ///
    /// # Errors
    /// As [`Engine::generate`](super::Engine::generate); no [`room`](BatchGeneration::room); more stop tokens in all
    /// than there is room for; or the fault of the run under way, whoever's it is, which ends all sequences with
    /// [`End::Failed`].
    pub fn add(&mut self, prompt: &[u32], options: &GenerateOptions) -> Result<usize, EngineError> {
        let asked = self.ask(prompt, options)?;
        self.pause()?;
        let number = self.put(prompt, asked)?;
        self.go_on()?;
        Ok(number)
    }

    /// What a sequence that may [join](BatchGeneration::add) is asked for.
    pub(super) fn ask(&self, prompt: &[u32], options: &GenerateOptions) -> Result<Asked, EngineError> {
        let (request, stop_tokens) = request(self.model, options)?;
        self.check_stop_tokens(&stop_tokens)?;
        check_prompt(self.model, self.context, prompt)?;
        if options.max_new_tokens > 0 && self.room() == 0 {
            return Err(EngineError::Full { sequences: self.slots.len() });
        }
        let stop_strings = options.stop_strings.clone();
        Ok(Asked {
            request,
            stop_tokens,
            stop_strings,
            deadline: options.deadline(),
            reuse_prefix: options.reuse_prefix,
        })
    }

    /// How many more sequences could be under way.
    pub fn room(&self) -> usize {
        self.slots.iter().filter(|slot| slot.followed.is_none()).count()
    }

    /// Ends sequence `sequence` after the token under way, with [`End::Stopped`], unless it has ended before; others go
    /// on. Tokens already made can still be taken.
    ///
    /// # Errors
    /// The fault of the run under way, which ends all sequences with [`End::Failed`].
    pub fn cancel(&mut self, sequence: usize) -> Result<(), EngineError> {
        let is_it = |slot: &Slot<'_>| slot.followed.as_ref().is_some_and(|followed| followed.number == sequence);
        if self.slots.iter().any(is_it) {
            self.pause()?;
            if let Some(at) = self.slots.iter().position(is_it) {
                self.release(at, End::Stopped)?;
            }
            self.go_on()?;
        }
        Ok(())
    }

    /// Asks all to end after the tokens under way; those already made can still be taken. Who joins later ends at once.
    pub fn stop(&self) {
        self.stopper.stop();
    }

    /// What does the same, from any thread.
    pub fn stopper(&self) -> Stopper {
        self.stopper.clone()
    }

    /// Why sequence `sequence` ended, once it has and all of its tokens have been taken.
    pub fn end(&self, sequence: usize) -> Option<End> {
        let end = self.all.get(sequence)?.end;
        end.filter(|_| self.ready.iter().all(|(number, _)| *number != sequence))
    }

    /// How many tokens of sequence `sequence`'s prompt its cache had already: see [`GenerateOptions::reuse_prefix`].
    pub fn reused(&self, sequence: usize) -> usize {
        self.all.get(sequence).map_or(0, |past| past.reused)
    }

    /// Whether all have ended and every token has been taken.
    pub fn is_ended(&self) -> bool {
        self.ready.is_empty() && self.room() == self.slots.len()
    }

    /// The next token if there is one within `patience`; `Ok(None)` says neither that there is one nor that all have
    /// ended (see [`BatchGeneration::is_ended`]).
    ///
    /// # Errors
    /// A run's first fault, which ends all sequences with [`End::Failed`].
    pub fn poll(&mut self, patience: Duration) -> Result<Option<(usize, Token)>, EngineError> {
        let began = Instant::now();
        loop {
            let is_over = self.run.is_over();
            if let Some(token) = self.take()? {
                return Ok(Some(token));
            }
            if is_over {
                // The reference has run as a whole; its tokens are there only now.
                self.settle()?;
                self.go_on()?;
                if self.is_ended() {
                    return Ok(None);
                }
            } else if began.elapsed() < patience {
                self.run.resident.rest();
            } else {
                return Ok(None);
            }
        }
    }

    /// A token that has been made, of the sequence of which the fewest have been taken.
    fn take(&mut self) -> Result<Option<(usize, Token)>, EngineError> {
        loop {
            if let Some(token) = self.ready.pop_front() {
                return Ok(Some(token));
            }
            let resident = &*self.run.resident;
            let waiting = self.slots.iter_mut().enumerate();
            let waiting = waiting.filter_map(|(at, slot)| Some((at, slot.followed.as_mut()?)));
            let waiting = waiting.filter(|(at, followed)| resident.produced_of(*at) as usize > followed.made.taken);
            let Some((at, followed)) = waiting.min_by_key(|(_, followed)| followed.n_made) else { return Ok(None) };
            let before = followed.made.taken;
            let token = followed.made.take(resident, before as u32 + 1);
            // It has been taken, whether it can be put into words or not.
            followed.n_made += followed.made.taken - before;
            let token = token?;
            let end = followed.made.end.or_else(|| followed.end(self.context));
            self.ready.extend(token.map(|token| (followed.number, token)));
            if end == Some(End::StopString) {
                // Workers go on with it until the run ends; another goes on without it.
                self.run.stop();
            }
            if let Some(end) = end {
                self.release(at, end)?;
            }
        }
    }

    /// Everything there is to take, for a run whose counts are about to begin anew.
    fn take_all(&mut self) -> Result<(), EngineError> {
        let mut all = VecDeque::new();
        while let Some(token) = self.take()? {
            all.push_back(token);
        }
        self.ready = all;
        Ok(())
    }

    /// The sequence in slot `at` has ended, and what it has made has been taken but for a token that waited for
    /// another.
    fn release(&mut self, at: usize, end: End) -> Result<(), EngineError> {
        let slot = &mut self.slots[at];
        let Some(mut followed) = slot.followed.take() else { return Ok(()) };
        // Workers know of no stop string, and may say anything; a state is beyond what has been taken then.
        let is_beyond = end == End::StopString && self.model.config().passes_states();
        slot.cached = if is_beyond { 0 } else { followed.cached() };
        slot.end = Some(end).filter(|end| *end != End::StopString);
        self.all[followed.number].end = Some(end);
        self.ready.extend(followed.made.take_last()?.map(|token| (followed.number, token)));
        Ok(())
    }

    /// Has the run under way end after its pass.
    fn pause(&mut self) -> Result<(), EngineError> {
        self.run.stop();
        self.settle()
    }

    /// Waits for the run's end, takes what it has made, and finds out which sequences go on.
    fn settle(&mut self) -> Result<(), EngineError> {
        if self.run.ended {
            return Ok(());
        }
        let outcome = self.run.finish();
        self.stopper.close();
        let control = match outcome {
            Ok(control) => control,
            Err(error) => return Err(self.fail(error)),
        };
        self.take_all()?;
        let now = Instant::now();
        for at in 0..self.slots.len() {
            let told = End::from_u32(control.sequences[at].end);
            let Some(followed) = &mut self.slots[at].followed else {
                let found = self.slots[at].end;
                assert!(found.is_none() || found == told, "s{at} has ended with {found:?} here, with {told:?} there");
                continue;
            };
            assert_eq!(told, Some(End::Stopped), "any other end of s{at} would have shown in its tokens");
            followed.known = control.sequences[at];
            if let Some(end) = self.stopper.why() {
                self.release(at, end)?;
            } else if followed.asked.deadline.is_some_and(|deadline| deadline <= now) {
                self.release(at, End::Deadline)?;
            }
        }
        Ok(())
    }

    /// A run has failed: no sequence goes on, and nothing is known of the caches.
    fn fail(&mut self, error: RunError) -> EngineError {
        for slot in &mut self.slots {
            if let Some(followed) = std::mem::take(slot).followed {
                self.all[followed.number].end = Some(End::Failed);
            }
        }
        error.into()
    }

    /// Puts a sequence into a slot. No run is under way.
    pub(super) fn put(&mut self, prompt: &[u32], asked: Asked) -> Result<usize, EngineError> {
        let (number, told) = (self.all.len(), self.stopper.why());
        let end = if asked.request.max_new_tokens == 0 { Some(End::MaxTokens) } else { told };
        if end.is_some() {
            self.all.push(Past { end, reused: 0 });
            return Ok(number);
        }
        let text = Text::of(self.model, &asked.stop_strings)?;
        let part = self.context + 1;
        let whole = self.model.config().passes_states();
        let mut best = None;
        for (at, slot) in self.slots.iter().enumerate().filter(|(_, slot)| slot.followed.is_none()) {
            // The last token is read in any case: of it the first new one is made.
            let kept = if asked.reuse_prefix { slot.cached } else { 0 };
            let position =
                reusable(kept, &prompt[..prompt.len() - 1], whole, |i| self.run.resident.token(at * part + i));
            // Of those with as much of it, the one that loses least to it.
            if best.is_none_or(|(_, most, least)| (position, least) > (most, kept)) {
                best = Some((at, position, kept));
            }
        }
        let Some((at, position, _)) = best else { return Err(EngineError::Full { sequences: self.slots.len() }) };
        self.run.resident.set_tokens(at * part, prompt);
        let made = Made { text, next: at * part + prompt.len(), taken: 0, last: None, held: None, end: None };
        self.slots[at].followed = Some(Followed {
            number,
            made,
            asked,
            prompt_len: prompt.len(),
            n_made: 0,
            known: Sequence { n_tokens: prompt.len() as u32, position: position as u32, ..Sequence::default() },
        });
        self.all.push(Past { end: None, reused: position });
        Ok(number)
    }

    /// Starts a run of the sequences there are, if there are any. None is under way, and nothing is left of the last
    /// one.
    pub(super) fn go_on(&mut self) -> Result<(), EngineError> {
        let mut control: Control = bytemuck::Zeroable::zeroed();
        control.max_context = self.context as u32;
        // Slots that nobody has have nothing to do.
        control.sequences.iter_mut().for_each(|sequence| sequence.end = End::MaxTokens as u32);
        let (mut stop_tokens, mut deadline) = (Vec::new(), None::<Instant>);
        for (at, slot) in self.slots.iter_mut().enumerate() {
            slot.end = None;
            let Some(followed) = &mut slot.followed else { continue };
            control.n_sequences = at as u32 + 1;
            control.sequences[at] = Sequence { produced: 0, end: End::Running as u32, ..followed.known };
            let request = &mut control.requests[at];
            *request = Request { stops: 0, ..followed.asked.request };
            request.max_new_tokens -= followed.n_made as u32;
            followed.made.taken = 0;
            for stop in &followed.asked.stop_tokens {
                let known = stop_tokens.iter().position(|known| known == stop);
                request.stops |= 1 << known.unwrap_or(stop_tokens.len());
                stop_tokens.extend(known.is_none().then_some(*stop));
            }
            deadline = deadline.into_iter().chain(followed.asked.deadline).min();
        }
        if control.n_sequences == 0 {
            return Ok(());
        }
        control.stop_tokens[..stop_tokens.len()].copy_from_slice(&stop_tokens);
        control.step = batch_step(&control, self.run.resident.compiled().image.view().programs, 0);
        let stopper = self.run.begin(control, deadline)?;
        self.stopper.open(move || stopper.stop());
        Ok(())
    }

    /// Whether those under way and another, which has `more`, have no more stop tokens than there is room for.
    fn check_stop_tokens(&self, more: &[u32]) -> Result<(), EngineError> {
        let under_way =
            self.slots.iter().flat_map(|slot| &slot.followed).flat_map(|followed| &followed.asked.stop_tokens);
        let mut all: Vec<u32> = under_way.chain(more).copied().collect();
        all.sort_unstable();
        all.dedup();
        check_stop_tokens(all.len(), "different ones of all sequences under way")
    }
}

impl Drop for BatchGeneration<'_> {
    fn drop(&mut self) {
        self.stopper.close();
    }
}

impl Iterator for BatchGeneration<'_> {
    type Item = Result<(usize, Token), EngineError>;

    fn next(&mut self) -> Option<Result<(usize, Token), EngineError>> {
        self.poll(Duration::MAX).transpose()
    }
}
