// Which instructions this library was compiled for. native/library.py checks it after loading.
//
// Other sources test the same macros: __AMX_BF16__ (with __AMX_TILE__ and __AMX_INT8__), then __AVX512F__ (BW, DQ and
// VL come with it; __AVX512BF16__ and __AVX512VNNI__ may be absent), then AVX2 with FMA and F16C, which all have.

#if !(defined(__AVX2__) && defined(__FMA__) && defined(__F16C__))
#error "moewe's kernels need at least AVX2, FMA and F16C"
#endif

extern "C" const char* moewe_isa() {
#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512BF16__)
  return "amx";
#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
  return "avx512";
#else
  return "avx2";
#endif
}
