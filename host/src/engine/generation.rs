//! Generations under way.

use super::resident::Resident;
use super::text::Text;
use super::{EngineError, Token};
use crate::exec::{RunError, Stopper};
use perpetua_shared::control::{Control, End};
use std::convert::Infallible;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A run under way, which is stopped when this is dropped.
#[derive(Debug)]
pub(super) struct Run<'a> {
    pub(super) resident: &'a mut Resident,
    stopper: Stopper,
    timer: Option<Timer>,
    pub(super) ended: bool,
}

impl<'a> Run<'a> {
    /// None: there is nothing to do yet.
    pub(super) fn none(resident: &'a mut Resident) -> Run<'a> {
        Run { resident, stopper: Stopper::default(), timer: None, ended: true }
    }

    /// Begins from `control`, until `deadline` at the longest; the one before has ended. Returns what ends it.
    ///
    /// # Errors
    /// The system gives no thread that looks at the clock.
    pub(super) fn begin(&mut self, control: Control, deadline: Option<Instant>) -> Result<Stopper, EngineError> {
        assert!(self.ended, "one run at a time");
        let stopper = Stopper::default();
        // Before the run, which may be over when it has been started.
        let timer = deadline.map(|deadline| Timer::new(deadline, &stopper)).transpose();
        self.timer = timer.map_err(EngineError::Threads)?.flatten();
        self.resident.start_with(control, &stopper);
        (self.stopper, self.ended) = (stopper, false);
        Ok(self.stopper.clone())
    }

    /// Has it end after the pass under way.
    pub(super) fn stop(&self) {
        self.stopper.stop();
    }

    pub(super) fn is_over(&mut self) -> bool {
        self.ended || !self.resident.is_running()
    }

    /// Waits for its end. Then what it has made is all there.
    pub(super) fn finish(&mut self) -> Result<Control, RunError> {
        self.ended = true;
        let outcome = self.resident.finish();
        self.timer = None;
        if let Ok(control) = &outcome {
            self.resident.keep(control);
        }
        outcome
    }
}

impl Drop for Run<'_> {
    fn drop(&mut self) {
        if !self.ended {
            self.stopper.stop();
            // Whatever the run ended with, nobody is there to hear it.
            let _ = self.finish();
        }
    }
}

/// A thread that tells a run to stop when its time is over, whoever asks for tokens or does not. It ends when this is
/// dropped.
#[derive(Debug)]
struct Timer {
    /// What the thread waits for: that this is dropped.
    watched: Option<Sender<Infallible>>,
    thread: Option<JoinHandle<()>>,
}

impl Timer {
    /// Of the run of `stopper`. `None`: its time is over, and it has been told.
    ///
    /// # Errors
    /// The system gives no thread.
    fn new(deadline: Instant, stopper: &Stopper) -> std::io::Result<Option<Timer>> {
        if Instant::now() >= deadline {
            stopper.tell(End::Deadline);
            return Ok(None);
        }
        let (watched, watching) = channel();
        let stopper = stopper.clone();
        let watch = move || {
            let left = deadline.saturating_duration_since(Instant::now());
            if watching.recv_timeout(left) == Err(RecvTimeoutError::Timeout) {
                stopper.tell(End::Deadline);
            }
        };
        let thread = std::thread::Builder::new().name("perpetua timer".to_owned()).spawn(watch)?;
        Ok(Some(Timer { watched: Some(watched), thread: Some(thread) }))
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        self.watched = None;
        if let Some(thread) = self.thread.take() {
            // If it panicked, it has said so.
            let _ = thread.join();
        }
    }
}

/// What one sequence has made.
#[derive(Debug)]
pub(super) struct Made<'a> {
    pub(super) text: Option<Text<'a>>,
    /// Where its next token lies in the token buffer.
    pub(super) next: usize,
    /// Of those of the run.
    pub(super) taken: usize,
    /// The last one that was taken.
    pub(super) last: Option<u32>,
    /// That one, when its text ends inside a character, or with what may become a stop string: what follows may
    /// complete it, and where nothing follows it is this one's text that has the rest.
    pub(super) held: Option<Token>,
    pub(super) end: Option<End>,
}

impl Made<'_> {
    /// The next of `produced` tokens.
    pub(super) fn take(&mut self, resident: &Resident, produced: u32) -> Result<Option<Token>, EngineError> {
        while !self.is_done(produced) {
            if let Some(token) = self.held.take() {
                return Ok(Some(token));
            }
            let id = resident.token(self.next);
            self.last = Some(id);
            (self.next, self.taken) = (self.next + 1, self.taken + 1);
            let (text, is_whole) = match &mut self.text {
                Some(text) => (text.push(id)?, text.is_whole()),
                None => (String::new(), true),
            };
            if self.is_stopped() {
                self.end = Some(End::StopString);
            }
            let token = Token { id, text };
            if is_whole {
                return Ok(Some(token));
            }
            self.held = Some(token);
        }
        Ok(None)
    }

    /// Whether none of `produced` tokens is left to take: what follows a stop string is nobody's.
    pub(super) fn is_done(&self, produced: u32) -> bool {
        self.is_stopped() || produced as usize <= self.taken
    }

    /// Whether its text has ended with a stop string, which workers do not know.
    pub(super) fn is_stopped(&self) -> bool {
        self.text.as_ref().is_some_and(Text::is_stopped)
    }

    /// The token that waited for another, which does not come.
    pub(super) fn take_last(&mut self) -> Result<Option<Token>, EngineError> {
        let Some(mut token) = self.held.take() else { return Ok(None) };
        if let Some(text) = self.text.take() {
            token.text.push_str(&text.finish()?);
        }
        Ok(Some(token))
    }
}

/// A generation under way: iterate over its tokens. Their texts are together the whole text.
#[derive(Debug)]
pub struct Generation<'a> {
    pub(super) run: Run<'a>,
    pub(super) made: Made<'a>,
    pub(super) prompt_len: usize,
    pub(super) reused: usize,
    /// Whether there is a run: where nothing is to be made there is none.
    pub(super) has_run: bool,
}

impl Generation<'_> {
    /// Asks the run to end after the token under way; tokens already made can still be taken.
    pub fn stop(&self) {
        self.run.stopper.stop();
    }

    /// What does the same, from any thread. Where a run is over when it has been started
    /// ([`Device::Reference`](super::Device) and [`Device::Simt`](super::Device)) it comes too late.
    pub fn stopper(&self) -> Stopper {
        self.run.stopper.clone()
    }

    /// How many of the prompt's tokens need not be read: see
    /// [`GenerateOptions::reuse_prefix`](super::GenerateOptions::reuse_prefix).
    pub fn reused(&self) -> usize {
        self.reused
    }

    /// How many of the prompt's tokens have been read.
    pub fn prompt_done(&self) -> usize {
        if self.has_run { (self.run.resident.position() as usize).min(self.prompt_len) } else { self.reused }
    }

    /// Why it ended, once it has.
    ///
    /// ```no_run
    /// # use perpetua::{End, Engine, EngineConfig, GenerateOptions, Model};
    /// # let model = Model::load("path/to/Qwen3-0.6B")?;
    /// # let mut engine = Engine::new(&model, &EngineConfig::default())?;
    /// let mut generation = engine.generate(&model.encode("A cat is")?, &GenerateOptions::default())?;
    /// let text = generation.by_ref().map(|token| token.map(|token| token.text)).collect::<Result<String, _>>()?;
    /// if generation.end() == Some(End::ContextFull) {
    ///     eprintln!("there was no room for more than {text:?}");
    /// }
    /// # Ok::<(), perpetua::EngineError>(())
    /// ```
    pub fn end(&self) -> Option<End> {
        self.made.end
    }

    /// The next token if there is one within `patience`; `Ok(None)` says neither that there is one nor that it has
    /// ended (see [`Generation::end`] and [`Generation::is_ended`]).
    ///
    /// # Errors
    /// The run's first fault.
    pub fn poll(&mut self, patience: Duration) -> Result<Option<Token>, EngineError> {
        let began = Instant::now();
        loop {
            let is_over = self.run.is_over();
            if let Some(token) = self.made.take(self.run.resident, self.run.resident.produced())? {
                if self.made.is_stopped() {
                    self.run.stop();
                }
                return Ok(Some(token));
            }
            if self.run.ended {
                return self.made.take_last();
            }
            if is_over {
                let control = self.run.finish().inspect_err(|_| self.made.end = Some(End::Failed))?;
                if !self.made.is_stopped() {
                    self.made.end = self.run.stopper.end(control.end);
                }
                // The reference has run as a whole; its tokens are there only now.
                continue;
            }
            if began.elapsed() >= patience {
                return Ok(None);
            }
            self.run.resident.rest();
        }
    }

    /// Whether the run is over and every token has been taken.
    pub fn is_ended(&self) -> bool {
        self.run.ended && self.made.held.is_none() && self.made.is_done(self.run.resident.produced())
    }
}

impl Iterator for Generation<'_> {
    type Item = Result<Token, EngineError>;

    fn next(&mut self) -> Option<Result<Token, EngineError>> {
        self.poll(Duration::MAX).transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Device, Engine, EngineConfig, GenerateOptions, Model};

    /// Waits for `what`, which nothing but its own doing brings about.
    fn eventually(mut what: impl FnMut() -> bool) {
        let began = Instant::now();
        while !what() {
            assert!(began.elapsed() < Duration::from_secs(120), "nothing happens");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_timer_tells_when_the_time_is_over_and_not_before() {
        let over = Stopper::default();
        assert!(Timer::new(Instant::now(), &over).unwrap().is_none() && over.is_told());

        let soon = Stopper::default();
        let timer = Timer::new(Instant::now() + Duration::from_millis(5), &soon).unwrap();
        eventually(|| soon.is_told());
        assert_eq!(soon.end(End::Stopped as u32), Some(End::Deadline));
        drop(timer);

        let late = Stopper::default();
        let timer = Timer::new(Instant::now() + Duration::from_secs(24 * 3600), &late).unwrap();
        assert!(timer.is_some());
        // It waits for the thread, not for the time.
        drop(timer);
        assert!(!late.is_told());
    }

    /// Only the end of the run is waited for here, and no token asked for.
    #[test]
    fn a_deadline_comes_though_nobody_asks_for_tokens() {
        let model = Model::load(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/tiny-qwen2")).unwrap();
        let config = EngineConfig {
            device: Device::Cpu,
            threads: Some(2),
            max_context: Some(4096),
            sequences: Some(2),
            ..EngineConfig::default()
        };
        let mut engine = Engine::new(&model, &config).unwrap();
        let options = GenerateOptions {
            max_new_tokens: 4000,
            max_time: Some(Duration::from_millis(10)),
            stop_tokens: Some(vec![]),
            ..GenerateOptions::default()
        };
        let mut generation = engine.generate(&[1, 2, 3], &options).unwrap();
        eventually(|| !generation.run.resident.is_running());
        let made = generation.run.resident.produced() as usize;
        assert_eq!(generation.by_ref().map(Result::unwrap).count(), made, "they can still be taken");
        assert_eq!(generation.end(), Some(End::Deadline), "{made} tokens");
        drop(generation);

        let mut batch = engine.generate_batch(&[[1, 2], [2, 1]], &options).unwrap();
        eventually(|| !batch.run.resident.is_running());
        assert!(batch.by_ref().map(Result::unwrap).count() < 8000);
        assert_eq!([0, 1].map(|sequence| batch.end(sequence)), [Some(End::Deadline); 2]);
    }
}
