//! What memory there is left for this process.

use std::path::Path;

/// Bytes this process could still be given, where the system says so: what the machine has, and no more than what its
/// control groups and its own limit on addresses leave. File pages that nobody has to keep count as free.
pub fn available_bytes() -> Option<u64> {
    let read = |path: &str| std::fs::read_to_string(path).ok();
    let machine = read("/proc/meminfo").and_then(|text| field(&text, "MemAvailable:"));
    let group = read("/proc/self/cgroup").and_then(|text| of_groups(Path::new("/sys/fs/cgroup"), &text));
    let addresses = || left_of_addresses(&read("/proc/self/limits")?, &read("/proc/self/status")?);
    [machine, group, addresses()].into_iter().flatten().min()
}

/// The number of `text`'s line that starts with `name`, in bytes.
fn field(text: &str, name: &str) -> Option<u64> {
    let mut words = text.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace();
    let number: u64 = words.next()?.parse().ok()?;
    Some(if words.next() == Some("kB") { number.saturating_mul(1024) } else { number })
}

/// What `RLIMIT_AS` leaves, by a process's `limits` and `status`.
fn left_of_addresses(limits: &str, status: &str) -> Option<u64> {
    Some(field(limits, "Max address space")?.saturating_sub(field(status, "VmSize:")?))
}

/// Where a version of control groups says what.
struct Files {
    limit: &'static str,
    used: &'static str,
    /// Lines of `memory.stat` that are pages of files.
    file_pages: [&'static str; 2],
}

const V1: Files = Files {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    file_pages: ["total_active_file ", "total_inactive_file "],
};
const V2: Files = Files { limit: "memory.max", used: "memory.current", file_pages: ["active_file ", "inactive_file "] };

/// What the groups of a process leave it, by its `membership`; their files lie under `root`.
fn of_groups(root: &Path, membership: &str) -> Option<u64> {
    let groups = membership.lines().filter_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next()?, parts.next()?);
        match controllers {
            "" => of_group(root, path, &V2),
            _ if controllers.split(',').any(|name| name == "memory") => of_group(&root.join("memory"), path, &V1),
            _ => None,
        }
    });
    groups.min()
}

/// The least that the group at `path` and those above it leave. A container may not see some of them; `root` itself is
/// then its own.
fn of_group(root: &Path, path: &str, files: &Files) -> Option<u64> {
    let folder = root.join(path.trim_start_matches('/'));
    let levels = folder.ancestors().take_while(|level| level.starts_with(root));
    let left = levels.filter_map(|level| {
        let read = |name: &str| std::fs::read_to_string(level.join(name)).ok();
        // `max` where there is no limit.
        let limit: u64 = read(files.limit)?.trim().parse().ok()?;
        let used: u64 = read(files.used)?.trim().parse().ok()?;
        let stat = read("memory.stat").unwrap_or_default();
        let file_pages: u64 = files.file_pages.iter().filter_map(|name| field(&stat, name)).sum();
        Some(limit.saturating_sub(used.saturating_sub(file_pages)))
    });
    left.min()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder as the system would show it: paths and their contents.
    fn files(entries: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a temporary folder");
        for (path, contents) in entries {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().expect("a file in a folder")).expect("folders");
            std::fs::write(path, contents).expect("a file");
        }
        root
    }

    #[test]
    fn the_tightest_group_decides() {
        let root = files(&[
            ("a/memory.max", "1000\n"),
            ("a/memory.current", "700\n"),
            ("a/memory.stat", "anon 400\ninactive_file 200\nactive_file 50\nfile 300\n"),
            ("a/b/memory.max", "max\n"),
            ("a/b/memory.current", "700\n"),
            ("c/memory.max", "100\n"),
            ("c/memory.current", "170\n"),
        ]);
        let left = |membership| of_groups(root.path(), membership);
        // The file's pages can go; the parent's limit holds for the child.
        assert_eq!(left("0::/a/b\n"), Some(1000 - (700 - 250)));
        assert_eq!(left("0::/a\n"), Some(550));
        assert_eq!(left("0::/c\n"), Some(0), "over its limit");
        assert_eq!(left("0::/\n"), None);
        assert_eq!(left("0::/a/not/shown\n"), Some(550));
        assert_eq!(left("4:memory:/a\nnonsense\n"), None, "the first version's files lie elsewhere");
    }

    #[test]
    fn the_first_version_of_groups_is_known() {
        let root = files(&[
            ("memory/memory.limit_in_bytes", "5000\n"),
            ("memory/memory.usage_in_bytes", "1000\n"),
            ("memory/x/memory.limit_in_bytes", "9223372036854771712\n"),
            ("memory/x/memory.usage_in_bytes", "800\n"),
            ("memory/memory.stat", "active_file 9\ntotal_active_file 100\ntotal_inactive_file 20\n"),
        ]);
        let left = |membership| of_groups(root.path(), membership);
        assert_eq!(left("9:cpu,memory:/x\n1:pids:/x\n0::/\n"), Some(5000 - (1000 - 120)));
        // A container that is told its name outside: its own group is the root it sees.
        assert_eq!(left("9:memory:/docker/77\n"), Some(4120));
    }

    #[test]
    fn a_limit_on_addresses_counts() {
        let limits =
            |soft| format!("Limit  Soft Limit  Hard Limit  Units\nMax address space         {soft} unlimited bytes\n");
        let status = "VmPeak:\t    9000 kB\nVmSize:\t    2000 kB\n";
        assert_eq!(left_of_addresses(&limits("3072000"), status), Some(1_024_000));
        assert_eq!(left_of_addresses(&limits("1000"), status), Some(0));
        assert_eq!(left_of_addresses(&limits("unlimited"), status), None);
    }
}
