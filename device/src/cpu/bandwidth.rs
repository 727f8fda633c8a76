//! How fast this machine reads memory: what decode speed is a share of.

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn read_wide(words: &[u64]) -> u64 {
    use core::arch::x86_64::*;
    let mut sums = [_mm512_setzero_si512(); 4];
    for chunk in words.chunks_exact(32) {
        for (i, sum) in sums.iter_mut().enumerate() {
            // SAFETY: a chunk is four vectors; a prefetch reads nothing.
            unsafe {
                _mm_prefetch::<_MM_HINT_T0>(chunk.as_ptr().wrapping_add(512 + 8 * i).cast());
                *sum = _mm512_add_epi64(*sum, _mm512_loadu_si512(chunk.as_ptr().add(8 * i).cast()));
            }
        }
    }
    sums.into_iter().map(|sum| _mm512_reduce_add_epi64(sum) as u64).fold(0, u64::wrapping_add)
}

/// Reads `words` as fast as one core can, and returns their sum so that the reading is not optimised away.
pub fn read(words: &[u64]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the feature has just been found.
        return unsafe { read_wide(words) };
    }
    let mut sums = [0u64; 8];
    for chunk in words.chunks_exact(8) {
        sums.iter_mut().zip(chunk).for_each(|(sum, word)| *sum = sum.wrapping_add(*word));
    }
    sums.into_iter().fold(0, u64::wrapping_add)
}
