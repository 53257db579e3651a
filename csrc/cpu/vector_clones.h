// Plain loops, compiled for several instruction sets, the best of which is chosen when the library is loaded.
#pragma once

// Before a function whose loops should become vector loops. -ffp-contract=off keeps their bits the same.
// Sanitizers are not ready yet when the choice is made, and PAGEDKV_PORTABLE_ONLY leaves it out.
#if defined(__x86_64__) && !defined(__clang__) && !defined(PAGEDKV_PORTABLE_ONLY)
#define PAGEDKV_VECTOR_CLONES [[gnu::target_clones("default", "avx2", "arch=x86-64-v4")]]
#else
#define PAGEDKV_VECTOR_CLONES
#endif
