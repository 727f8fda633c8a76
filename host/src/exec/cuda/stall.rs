//! What is made of a run of which nothing is heard: how long it is waited for, and where its workers were.
//!
//! A kernel ends by itself, if only because a wait has outlasted its bound. One of which nothing has been heard for
//! several times as long is told to stop, and given up when that was in vain.

use super::Options;
use super::device::Device;
use crate::cuda::driver::{CudaError, DevicePtr, Pinned};
use crate::exec::RunError;
use crate::image::Image;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How long a run is waited for.
#[derive(Debug)]
pub(super) struct Patience {
    /// So long, when nothing is heard of it, and once more when it has been told to stop.
    limit: Duration,
    silence: Option<Silence>,
    /// For how long the run had not been heard of when it was told to stop for that, and nobody else had told it.
    gave_up: Option<Duration>,
}

/// A run's, since the host last looked and heard something new.
#[derive(Debug)]
struct Silence {
    passes: usize,
    since: Instant,
    /// When the run was told to stop for it.
    told: Option<Instant>,
}

/// What is to be done about a run that is under way.
#[derive(Debug)]
pub(super) enum Verdict {
    /// Nothing.
    Wait,
    /// It is told to stop.
    Stop,
    /// It has been told in vain, and has been silent for so long.
    GiveUp(Duration),
}

impl Patience {
    /// With kernels whose waits are no longer than `timeout`.
    pub(super) fn new(timeout: Duration) -> Patience {
        Patience {
            limit: timeout.saturating_mul(4).saturating_add(Duration::from_secs(2)),
            silence: None,
            gave_up: None,
        }
    }

    /// A run begins.
    pub(super) fn begin(&mut self) {
        self.silence = None;
        self.gave_up = None;
    }

    /// Of the run nothing can be heard yet.
    pub(super) fn rest(&mut self) {
        self.silence = None;
    }

    /// Of the run `passes` passes have been heard; `is_told` says whether somebody has told it to stop.
    pub(super) fn judge(&mut self, passes: usize, is_told: bool) -> Verdict {
        let silence = self.silence.get_or_insert_with(|| Silence { passes, since: Instant::now(), told: None });
        if silence.passes != passes {
            self.silence = None;
            return Verdict::Wait;
        }
        if silence.told.unwrap_or(silence.since).elapsed() <= self.limit {
            return Verdict::Wait;
        }
        if silence.told.replace(Instant::now()).is_some() {
            return Verdict::GiveUp(silence.since.elapsed());
        }
        // The first time counts: after it the run has been told, though not by whoever wanted it to end.
        if self.gave_up.is_none() {
            self.gave_up = Some(silence.since.elapsed()).filter(|_| !is_told);
        }
        Verdict::Stop
    }

    /// What a run has come to that was stopped, if it was stopped for its silence.
    pub(super) fn stopped(&self) -> Option<RunError> {
        let silent = self.gave_up?.as_secs_f64();
        Some(of_a_run(format!("the kernel was not heard of for {silent:.1} s, and was told to stop")))
    }
}

/// A run that was given up after it had been `silent` for so long, with its workers at the places that are told.
pub(super) fn given_up(silent: Duration, places: Option<String>) -> RunError {
    of_a_run(format!(
        "the kernel has not been heard of for {:.1} s and does not end; the GPU's context cannot be used any more by this process{}",
        silent.as_secs_f64(),
        places.unwrap_or_default()
    ))
}

fn of_a_run(what: String) -> RunError {
    RunError::Defect { task: "a run".to_owned(), worker: "the GPU".to_owned(), what }
}

/// Where workers say which task each began last, one more than its number: on the device, or, if it is recorded, in
/// memory of the host, where it is told whatever the device does.
#[derive(Debug)]
pub(super) struct Positions {
    recorder: Option<Pinned>,
    n_workers: usize,
}

impl Positions {
    /// Of `n_workers` workers.
    pub(super) fn new(device: &mut Device, n_workers: u32, options: &Options) -> Result<Positions, CudaError> {
        let n_workers = n_workers as usize;
        let recorder = options.recorder.then(|| device.resources.pinned(4 * n_workers)).transpose()?;
        Ok(Positions { recorder, n_workers })
    }

    /// Where the kernel finds them.
    pub(super) fn address(&self, device: &Device) -> DevicePtr {
        self.recorder.map_or(device.place(device.layout.positions), |recorder| recorder.device)
    }

    /// A run begins, in which nobody has begun anything.
    ///
    /// # Safety
    /// No kernel runs.
    pub(super) unsafe fn clear(&self) {
        if let Some(recorder) = self.recorder {
            // SAFETY: a word for every worker, which is the host's until a kernel runs.
            unsafe { recorder.host.write_bytes(0, 4 * self.n_workers) };
        }
    }

    /// What each worker of `image` began last, in words.
    ///
    /// # Safety
    /// No kernel runs.
    pub(super) unsafe fn told(&self, device: &Device, image: &Image) -> Result<String, CudaError> {
        if let Some(recorded) = self.recorded(image) {
            return Ok(recorded);
        }
        let mut words = vec![0u32; self.n_workers];
        // SAFETY: its place in the layout; no kernel runs.
        unsafe { device.read(self.address(device), bytemuck::cast_slice_mut(&mut words))? };
        Ok(places(image, &words))
    }

    /// The same, where it is in memory of the host.
    pub(super) fn recorded(&self, image: &Image) -> Option<String> {
        let words = self.recorder?.host.cast::<u32>();
        // SAFETY: a word for every worker, aligned, which a kernel may write meanwhile.
        let words = (0..self.n_workers).map(|worker| unsafe { words.add(worker).read_volatile() });
        Some(places(image, &words.collect::<Vec<u32>>()))
    }
}

/// `words`, one more than the task of `image` that each worker began last, in words: equal ones together, the rarest
/// (those that are behind) first.
fn places(image: &Image, words: &[u32]) -> String {
    let mut at: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for (worker, word) in words.iter().enumerate() {
        let place = match word.checked_sub(1) {
            Some(task) => image.task_name(task),
            None => "nothing yet".to_owned(),
        };
        at.entry(place).or_default().push(worker);
    }
    let mut groups: Vec<(String, Vec<usize>)> = at.into_iter().collect();
    groups.sort_by_key(|(_, workers)| workers.len());
    let words = groups.iter().take(8).map(|(place, workers)| match workers[..] {
        [worker] => format!("w{worker} began {place}"),
        [first, ..] => format!("{} workers (w{first}, ...) began {place}", workers.len()),
        [] => unreachable!("a group has a member"),
    });
    format!("; last, {}", words.collect::<Vec<_>>().join(", "))
}
