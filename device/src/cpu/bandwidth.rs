//! How fast this machine reads memory: what decode speed is a share of.

/// Streams read side by side: four distant ones are faster than one (33.6 against 31.2 GB/s on two cores of an Emerald
/// Rapids, 2026-11-20), and what a model's speed is compared with should be the fastest way of reading.
const STREAMS: usize = 4;

/// Words of a cache line.
const LINE: usize = 8;

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn read_wide(streams: [&[u64]; STREAMS]) -> u64 {
    use core::arch::x86_64::*;
    /// Cache lines a stream is asked for ahead: 2 KiB.
    const AHEAD: usize = 32;
    let mut sums = [_mm512_setzero_si512(); STREAMS];
    let lines = streams[0].len() / LINE;
    for line in 0..lines {
        for (stream, sum) in streams.iter().zip(&mut sums) {
            let at = stream.as_ptr().wrapping_add(line * LINE);
            // SAFETY: the streams are equally long, so line `line` is inside each; a prefetch reads nothing.
            unsafe {
                _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(AHEAD * LINE).cast());
                *sum = _mm512_add_epi64(*sum, _mm512_loadu_si512(at.cast()));
            }
        }
    }
    sums.into_iter().map(|sum| _mm512_reduce_add_epi64(sum) as u64).fold(0, u64::wrapping_add)
}

/// Reads `bytes` (but for a few at the ends) as fast as one core can, and returns a sum of them so that the reading is
/// not optimised away.
pub fn read(bytes: &[u8]) -> u64 {
    // SAFETY: every bit pattern is a u64.
    let (_, words, _) = unsafe { bytes.align_to::<u64>() };
    let quarter = words.len() / STREAMS;
    let streams: [&[u64]; STREAMS] = core::array::from_fn(|i| &words[i * quarter..(i + 1) * quarter]);
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the feature has just been found.
        return unsafe { read_wide(streams) };
    }
    let mut sums = [[0u64; LINE]; STREAMS];
    for line in 0..quarter / LINE {
        for (stream, sums) in streams.iter().zip(&mut sums) {
            for (sum, word) in sums.iter_mut().zip(&stream[line * LINE..][..LINE]) {
                *sum = sum.wrapping_add(*word);
            }
        }
    }
    sums.into_iter().flatten().fold(0, u64::wrapping_add)
}
