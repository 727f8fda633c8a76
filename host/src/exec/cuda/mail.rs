//! What the host sees of a run that is under way: the [mailbox](perpetua_shared::launch::Mail), pinned memory that the
//! kernel writes and never waits for, and what has been read there.

use super::device::Device;
use super::launch::steps;
use crate::cuda::driver::{CudaError, Pinned};
use perpetua_device::worker::ImageView;
use perpetua_shared::control::{Control, Step};
use perpetua_shared::image::ProgramDesc;
use perpetua_shared::launch::Mail;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The mailbox.
#[derive(Debug)]
pub(super) struct Mailbox {
    memory: Pinned,
    /// Its entries.
    pub(super) n_mail: usize,
    seen: Mutex<Seen>,
}

impl Mailbox {
    /// For an image whose token buffer has so many `places`, be it of a graph whose passes read rows of something else.
    pub(super) fn new(device: &mut Device, view: &ImageView<'_>, places: usize) -> Result<Mailbox, CudaError> {
        let n_mail = view.programs.iter().map(|program| program.max_rows as usize).max().unwrap_or(0).max(places) + 1;
        let memory = device.resources.pinned(n_mail * size_of::<Mail>())?;
        Ok(Mailbox { memory, n_mail, seen: Mutex::default() })
    }

    /// Where the device finds it.
    pub(super) fn address(&self) -> u64 {
        self.memory.device.0
    }

    /// A run begins, whose passes write these entries: nothing of it has been seen.
    pub(super) fn begin(&self, post: Post) {
        self.seen().begin(post);
    }

    /// No mail.
    ///
    /// # Safety
    /// No kernel runs.
    pub(super) unsafe fn clear(&self) {
        // SAFETY: all of it, which is the host's until a kernel runs.
        unsafe { self.memory.host.write_bytes(0, self.n_mail * size_of::<Mail>()) };
    }

    /// What has been seen, until now.
    pub(super) fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads what mail there is.
    pub(super) fn look(&self) -> MutexGuard<'_, Seen> {
        let mut seen = self.seen();
        let entry = |at: usize| {
            if at >= self.n_mail {
                return None;
            }
            let mail = self.memory.host.cast::<Mail>().wrapping_add(at);
            // SAFETY: inside the mailbox, aligned; the kernel writes the word at once, and the host only between runs.
            let word = unsafe { AtomicU64::from_ptr(&raw mut (*mail).word) };
            Mail::read(word.load(Ordering::Acquire))
        };
        let next_read = |seen: &Seen| seen.post.reads.get(seen.n_read).copied();
        while let Some((position, _)) = next_read(&seen).and_then(entry) {
            seen.n_read += 1;
            seen.position = position;
        }
        for sequence in 0..seen.made.len() {
            while let Some((position, Some(token))) = entry(seen.next_of(sequence)) {
                seen.make(sequence, token, position);
                seen.position = position;
            }
        }
        seen
    }

    /// When each pass ended, of a run that was `launched` then and has `finished`, if it has. The GPU's clock tells the
    /// distances between passes, the host's the time of the last.
    pub(super) fn stamps(&self, launched: Instant, finished: Option<Instant>) -> Vec<Instant> {
        let seen = self.look();
        let finished = finished.unwrap_or_else(Instant::now);
        let mail = |pass| self.memory.host.cast::<Mail>().wrapping_add(seen.entry(pass));
        // SAFETY: inside the mailbox, and written before the words that have been seen, or at the kernel's end at the
        // latest.
        let stamp = |pass: usize| unsafe { (&raw const (*mail(pass)).stamp_ns).read_volatile() };
        let last = seen.passes().checked_sub(1).map_or(0, stamp);
        let ago = |pass| Duration::from_nanos(last.saturating_sub(stamp(pass)));
        (0..seen.passes()).map(|pass| finished.checked_sub(ago(pass)).unwrap_or(launched)).collect()
    }
}

/// Which entries of the mailbox the passes of a run write.
#[derive(Debug, Default)]
pub(super) struct Post {
    /// Of the passes that read prompts and make no token, which come first: where the last token that each reads stands
    /// in the token buffer.
    reads: Vec<usize>,
    /// Where the next token of each sequence will stand, in the token buffer, too, when the run begins.
    first: Vec<usize>,
}

impl Post {
    /// Of a run from `control`, of an image with `programs`; a sequence has `part` tokens of the buffer.
    pub(super) fn new(control: &Control, programs: &[ProgramDesc], part: usize) -> Post {
        let sequences = control.sequences[..control.n_sequences as usize].iter().enumerate();
        let first = match control.n_sequences {
            0 => vec![control.n_tokens as usize],
            _ => sequences.map(|(at, sequence)| at * part + sequence.n_tokens as usize).collect(),
        };
        let last = |step: Step| step.sequence as usize * part + (step.first_pos + step.rows).saturating_sub(1) as usize;
        Post { reads: steps(control, programs).take_while(|step| step.sampling == 0).map(last).collect(), first }
    }
}

/// What the host has seen of the run under way.
#[derive(Debug, Default)]
pub(super) struct Seen {
    post: Post,
    /// Passes that have read prompts.
    n_read: usize,
    /// What has been made of each sequence.
    made: Vec<Made>,
    /// Tokens in the cache.
    position: u32,
    /// The token buffer, as far as the host has written it or heard of it.
    tokens: Vec<u32>,
}

/// What a run has made of a sequence.
#[derive(Clone, Debug, Default)]
struct Made {
    /// Tokens.
    n: usize,
    /// The entry of each pass's first token, and how many tokens were in the cache when the last one had ended.
    passes: Vec<usize>,
    position: u32,
}

impl Seen {
    /// Of a run that begins, over what the token buffer holds.
    fn begin(&mut self, post: Post) {
        let made = vec![Made::default(); post.first.len()];
        *self = Seen { made, post, n_read: 0, position: 0, tokens: std::mem::take(&mut self.tokens) };
    }

    /// The host has written `tokens` at `position` of the token buffer.
    pub(super) fn set_tokens(&mut self, position: usize, tokens: &[u32]) {
        let end = position + tokens.len();
        if self.tokens.len() < end {
            self.tokens.resize(end, 0);
        }
        self.tokens[position..end].copy_from_slice(tokens);
    }

    /// The token at `position` of the token buffer.
    pub(super) fn token(&self, position: usize) -> u32 {
        self.tokens[position]
    }

    /// Tokens made by all sequences together.
    pub(super) fn produced(&self) -> u32 {
        self.made.iter().map(|made| made.n as u32).sum()
    }

    /// Those of them for sequence `sequence`.
    pub(super) fn produced_of(&self, sequence: usize) -> u32 {
        self.made.get(sequence).map_or(0, |made| made.n as u32)
    }

    /// Tokens in the cache.
    pub(super) fn position(&self) -> u32 {
        self.position
    }

    /// How many passes have ended.
    pub(super) fn passes(&self) -> usize {
        self.n_read + self.longest().len()
    }

    /// The sequence that most passes have made tokens of: any has one from each, until it ends.
    fn longest(&self) -> &[usize] {
        self.made.iter().map(|made| &made.passes[..]).max_by_key(|passes| passes.len()).unwrap_or_default()
    }

    /// The entry of pass `pass`, which has ended.
    fn entry(&self, pass: usize) -> usize {
        let reads = &self.post.reads;
        reads.get(pass).copied().unwrap_or_else(|| self.longest()[pass - reads.len()])
    }

    /// Where the next token of `sequence` will stand.
    fn next_of(&self, sequence: usize) -> usize {
        self.post.first[sequence] + self.made[sequence].n
    }

    /// Sequence `sequence` has made `token`, in a pass after which there were `position` tokens in the cache.
    fn make(&mut self, sequence: usize, token: u32, position: u32) {
        let at = self.next_of(sequence);
        let made = &mut self.made[sequence];
        made.n += 1;
        // Those of one pass say the same, and each pass reads something.
        if made.passes.is_empty() || made.position != position {
            made.passes.push(at);
            made.position = position;
        }
        if at >= self.tokens.len() {
            self.tokens.resize(at + 1, 0);
        }
        self.tokens[at] = token;
    }
}
