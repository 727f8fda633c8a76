//! What drills and pictures ask of the executor, between runs.

use super::Cuda;
use crate::cuda::driver::DevicePtr;
use crate::exec::RunError;
use perpetua_shared::launch::TaskTrace;
use perpetua_shared::{EventId, TaskId, Turn, WorkerId};
use std::mem::offset_of;

impl Cuda {
    /// For drills: `event` will be one trigger short in every run to come until a fault, so that whoever waits for it
    /// stalls. Waits for a run to end.
    ///
    /// # Errors
    /// A device that is lost.
    pub fn miscount(&mut self, event: EventId) -> Result<(), RunError> {
        self.wait();
        let n_events = self.launches.params.n_events;
        assert!(event.0 < n_events, "the image has {n_events} events");
        let counter = self.device.place(self.device.layout.counters + 4 * u64::from(event.0));
        let mut count = 0u32;
        // SAFETY: the event's counter; no kernel runs.
        let write = unsafe {
            self.device
                .read(counter, bytemuck::bytes_of_mut(&mut count))
                .and_then(|()| self.device.write(counter, &count.wrapping_sub(1).to_ne_bytes()))
        };
        write.map_err(|error| self.lose(error))
    }

    /// For drills: task `task` will write nothing, until it is no longer muted, so that whoever waits for what it
    /// [flags](perpetua_shared::flag) stalls. Waits for a run to end.
    ///
    /// # Errors
    /// A device that is lost.
    pub fn mute(&mut self, task: TaskId, is_muted: bool) -> Result<(), RunError> {
        self.wait();
        let params = &self.launches.params;
        assert!(task.0 < params.n_tasks, "the image has {} tasks", params.n_tasks);
        let record = params.turns + 4 * u64::from(params.turn_words) * u64::from(task.0);
        let word = DevicePtr(record).offset(offset_of!(Turn, row_first) as u64);
        // No pass has so many rows.
        let row_first = if is_muted { u32::MAX } else { self.image.view().tasks[task.idx()].row_first };
        // SAFETY: a word of the task's record; no kernel runs.
        unsafe { self.device.write(word, &row_first.to_ne_bytes()) }.map_err(|error| self.lose(error))
    }

    /// Whether runs to come take times: as many as [`Options::n_trace`](super::Options::n_trace) made room for.
    pub fn set_tracing(&mut self, is_tracing: bool) {
        self.is_tracing = is_tracing;
    }

    /// When each worker ran the first [`Options::n_trace`](super::Options::n_trace) tasks of the last run that took
    /// times; waits for a run to end.
    ///
    /// # Errors
    /// A device that is lost.
    pub fn trace(&mut self) -> Result<Vec<(WorkerId, TaskTrace)>, RunError> {
        self.wait();
        let n_trace = self.options.n_trace as usize;
        let mut entries = vec![TaskTrace::default(); n_trace * self.launches.params.n_workers as usize];
        let from = self.device.place(self.device.layout.trace);
        // SAFETY: its place in the layout; no kernel runs.
        let read = unsafe { self.device.read(from, bytemuck::cast_slice_mut(&mut entries)) };
        read.map_err(|error| self.lose(error))?;
        let rows = entries.chunks(n_trace.max(1)).zip(0..);
        let written = rows.flat_map(|(row, w)| row.iter().filter(|e| e.ended_ns != 0).map(move |e| (WorkerId(w), *e)));
        Ok(written.collect())
    }
}
