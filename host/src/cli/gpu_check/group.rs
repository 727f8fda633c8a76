//! Processes that end together: a section of the check, and whatever it starts.
//!
//! A section leads a process group of its own, so that what it has started can be ended with it, whether it took too
//! long, crashed or went away and left others behind. A group of its own gets no Ctrl-C and no hangup from the
//! terminal; so a section holds the read end of a pipe as its standard input, whose write end only its parent has. When
//! that closes, however the parent ended, the section ends its group.

use std::io;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// A process and all it starts. Dropped, they end.
#[derive(Debug)]
pub(super) struct Group {
    leader: Child,
}

impl Group {
    /// Starts `command` as the leader of a group; it should [`follow`].
    pub(super) fn spawn(command: &mut Command) -> io::Result<Group> {
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(command, 0);
        Ok(Group { leader: command.stdin(Stdio::piped()).spawn()? })
    }

    /// Waits for the leader, but no longer than `limit`; then the group ends. How the leader did.
    pub(super) fn within(mut self, limit: Duration) -> Result<ExitStatus, String> {
        let began = Instant::now();
        let outcome = loop {
            match self.has_ended() {
                Ok(false) if began.elapsed() < limit => std::thread::sleep(Duration::from_millis(20)),
                Ok(false) => break Err(format!("not done after {} s", limit.as_secs())),
                Ok(true) => break Ok(()),
                Err(error) => break Err(error.to_string()),
            }
        };
        self.end();
        let status = self.leader.wait().map_err(|error| error.to_string())?;
        outcome.map(|()| status)
    }

    /// Whether the leader has ended. It is left to be waited for, so that its number stays its own.
    #[cfg(unix)]
    fn has_ended(&mut self) -> io::Result<bool> {
        // SAFETY: zeroes are a value of the record, which the call fills in.
        let (done, info) = unsafe {
            let mut info: libc::siginfo_t = std::mem::zeroed();
            let how = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
            (libc::waitid(libc::P_PID, self.leader.id(), &raw mut info, how), info)
        };
        // The signal's number stays 0 where there was nothing to tell.
        if done == 0 { Ok(info.si_signo != 0) } else { Err(io::Error::last_os_error()) }
    }

    #[cfg(not(unix))]
    fn has_ended(&mut self) -> io::Result<bool> {
        self.leader.try_wait().map(|status| status.is_some())
    }

    /// Kills everyone; there may be nobody left.
    fn end(&mut self) {
        #[cfg(unix)]
        // SAFETY: it only sends a signal, to the group that this process made: its leader has not been waited for, so
        // no other group has the number.
        unsafe {
            libc::kill(-(self.leader.id() as libc::pid_t), libc::SIGKILL);
        }
        #[cfg(not(unix))]
        let _ = self.leader.kill();
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if matches!(self.leader.try_wait(), Ok(None)) {
            self.end();
            let _ = self.leader.wait();
        }
    }
}

/// Ends this process and its group when whoever started it as a [`Group`] has ended; for others it does nothing.
pub(super) fn follow() {
    // SAFETY: they ask for numbers.
    #[cfg(unix)]
    if unsafe { libc::getpgrp() == libc::getpid() } {
        std::thread::spawn(|| {
            let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
            // SAFETY: it only sends a signal, to the group of which this process is the leader.
            unsafe { libc::kill(0, libc::SIGKILL) };
        });
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    /// Whether process `pid` runs: it is there, and not only its remains.
    fn runs(pid: &str) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.trim_start().starts_with('Z'))
    }

    /// A leader whose child would run for a minute, and the file in which it says the child's number.
    fn parent_of_a_sleeper(then: &str) -> (tempfile::TempDir, Command) {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let mut command = Command::new("sh");
        command.current_dir(dir.path()).args(["-c", &format!("sleep 60 & echo $! > new; mv new child; {then}")]);
        (dir, command)
    }

    fn ends_with_its_child(then: &str, limit: Duration) -> Result<ExitStatus, String> {
        let (dir, mut command) = parent_of_a_sleeper(then);
        let group = Group::spawn(&mut command).expect("there is a shell");
        let outcome = group.within(limit);
        let child = std::fs::read_to_string(dir.path().join("child")).expect("it has started");
        // The kernel has sent the signal; the child takes it when it next runs.
        for _ in 0..500 {
            if !runs(child.trim()) {
                return outcome;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("process {child} was left behind");
    }

    #[test]
    fn whoever_takes_too_long_ends_with_all_it_started() {
        let outcome = ends_with_its_child("sleep 60", Duration::from_secs(1));
        assert_eq!(outcome, Err("not done after 1 s".to_owned()));
    }

    #[test]
    fn whoever_ends_leaves_nobody_behind() {
        let status = ends_with_its_child("exit 3", Duration::from_secs(50)).expect("it ended");
        assert_eq!(status.code(), Some(3));
        let status = ends_with_its_child("kill -SEGV $$", Duration::from_secs(50)).expect("it ended");
        assert_eq!(status.code(), None);
    }
}
