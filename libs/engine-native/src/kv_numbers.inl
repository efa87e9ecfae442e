// Vectors of numbers as pages hold them, and what attention does with vectors: transpositions,
// sums of many at once, powers of two. Nothing here reads or writes beyond `n` numbers.
namespace halfmoon { namespace HALFMOON_ISA { namespace {

// The compiler's own macros are those of its command line, not of the target that a pragma sets.
#if HALFMOON_LANES == 16
#define HALFMOON_AVX512 1
#else
#define HALFMOON_AVX512 0
#endif
// Whether products of two pairs of bfloat16 numbers are added to a float at once.
#if defined(HALFMOON_BF16_DOT) && HALFMOON_AVX512
#define HALFMOON_PAIRS 1
#else
#define HALFMOON_PAIRS 0
#endif

#if HALFMOON_AVX512
// For masked forms of intrinsics: the plain ones make GCC 12 warn of uninitialised vectors.
constexpr __mmask16 kAllLanes = 0xffff;
#endif

// Round up to whole vectors.
constexpr int64_t whole_vectors(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

inline Floats bits_to_floats(Words words) { return reinterpret_cast<Floats &>(words); }
inline Words floats_to_bits(Floats x) { return reinterpret_cast<Words &>(x); }

// max(a, b); b where one is not a number.
inline Floats larger(Floats a, Floats b) {
#if HALFMOON_AVX512
  return reinterpret_cast<Floats>(
      _mm512_maskz_max_ps(kAllLanes, reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
#else
  return a > b ? a : b;
#endif
}

inline Floats round_to_integers(Floats x) {
#if HALFMOON_AVX512
  return reinterpret_cast<Floats>(
      _mm512_maskz_roundscale_ps(kAllLanes, reinterpret_cast<__m512>(x), 8));
#else
  return (x + 12582912.0f) - 12582912.0f;
#endif
}

// 2^x for x ≤ 127; 0 below -126. Relative error below 2e-7, or 3e-6 where `rough`.
template <bool rough> inline Floats power_of_two(Floats x) {
  Floats limited = larger(spread(-126.5f), x);
  Floats rounded = round_to_integers(limited);
  Floats r = limited - rounded;
  Floats p;
  // Polynomials of least relative error on [-0.5, 0.5].
  if constexpr (rough) {
    p = spread(0.009570101276040077f);
    p = p * r + 0.05591785907745361f;
    p = p * r + 0.240247443318367f;
    p = p * r + 0.6931217908859253f;
    p = p * r + 0.9999992847442627f;
  } else {
    p = spread(0.001327647129073739f);
    p = p * r + 0.009675540961325169f;
    p = p * r + 0.05550713092088699f;
    p = p * r + 0.24022120237350464f;
    p = p * r + 0.6931469440460205f;
    p = p * r + 1.0000001192092896f;
  }
#if HALFMOON_AVX512
  __m512 value = reinterpret_cast<__m512>(p);
  __mmask16 kept = _mm512_cmp_ps_mask(reinterpret_cast<__m512>(x), _mm512_set1_ps(-126.5f),
                                      _CMP_NLT_UQ);
  return reinterpret_cast<Floats>(
      _mm512_maskz_scalef_ps(kept, value, reinterpret_cast<__m512>(rounded)));
#else
  Ints exponents = __builtin_convertvector(rounded, Ints) << 23;
  Ints bits = reinterpret_cast<Ints &>(p) + exponents;
  bits &= ~(x < spread(-126.5f));
  return reinterpret_cast<Floats &>(bits);
#endif
}

inline float power_of_two(float x) {
  return x < -126.5f ? 0.0f : __builtin_exp2f(x);
}

inline Floats load_f16(const uint16_t *p) {
#if HALFMOON_AVX512
  return reinterpret_cast<Floats>(_mm512_maskz_cvtph_ps(
      kAllLanes, _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p))));
#elif HALFMOON_LANES == 8
  return reinterpret_cast<Floats>(
      _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))));
#elif defined(__aarch64__)
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else
  Words words = __builtin_convertvector(*reinterpret_cast<const Halves *>(p), Words);
  // The exponents are 112 too small; infinities and NaN keep the largest exponent.
  Floats x = bits_to_floats((words & 0x7fffu) << 13) * 0x1p112f;
  Words special = reinterpret_cast<Words>(x >= spread(65536.0f)) & 0x7f800000u;
  return bits_to_floats(floats_to_bits(x) | special | ((words & 0x8000u) << 16));
#endif
}

template <DType dtype> constexpr int64_t kNumberBytes = dtype == DType::float32 ? 4 : 2;

// Load kLanes numbers.
template <DType dtype> inline Floats load_numbers(const char *p) {
  if constexpr (dtype == DType::float32)
    return load(reinterpret_cast<const float *>(p));
  else if constexpr (dtype == DType::bfloat16)
    return load_bf16(reinterpret_cast<const uint16_t *>(p));
  else
    return load_f16(reinterpret_cast<const uint16_t *>(p));
}

// Load the first n < kLanes numbers, and zeros.
template <DType dtype> inline Floats load_numbers(const char *p, int64_t n) {
#if HALFMOON_AVX512
  __mmask16 mask = static_cast<__mmask16>((1u << n) - 1);
  if constexpr (dtype == DType::float32) {
    return reinterpret_cast<Floats>(_mm512_maskz_loadu_ps(mask, p));
  } else {
    __m256i halves = _mm256_maskz_loadu_epi16(mask, p);
    return load_numbers<dtype>(reinterpret_cast<const char *>(&halves));
  }
#else
  char numbers[kLanes * 4] = {};
  memcpy(numbers, p, static_cast<size_t>(n * kNumberBytes<dtype>));
  return load_numbers<dtype>(numbers);
#endif
}

// Load the first n ≤ 2·kLanes numbers into two vectors, and zeros: in the order of memory, or of
// bfloat16 numbers the even ones and the odd ones, which takes fewer instructions.
template <DType dtype>
inline __attribute__((always_inline)) void load_two(const char *p, int64_t n, Floats &first,
                                                    Floats &second) {
  constexpr int64_t size = kNumberBytes<dtype>;
  char numbers[2 * kLanes * size];
  if (n < 2 * kLanes) {
    memset(numbers, 0, sizeof numbers);
    memcpy(numbers, p, static_cast<size_t>(n * size));
    p = numbers;
  }
  if constexpr (dtype == DType::bfloat16) {
    Words words; // rows of an odd number of bfloat16 begin between words
    memcpy(&words, p, sizeof words);
    first = bits_to_floats(words << 16);
    second = bits_to_floats(words & 0xffff0000u);
  } else {
    first = load_numbers<dtype>(p);
    second = load_numbers<dtype>(p + kLanes * size);
  }
}

// The lower or upper halves of two vectors, alternating: a0 b0 a1 b1 …
#if HALFMOON_LANES == 16
template <typename V> inline V zip_low(V a, V b) {
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
template <typename V> inline V zip_high(V a, V b) {
  return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15,
                                 31);
}
#elif HALFMOON_LANES == 8
template <typename V> inline V zip_low(V a, V b) {
  return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
}
template <typename V> inline V zip_high(V a, V b) {
  return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
}
#else
template <typename V> inline V zip_low(V a, V b) {
  return __builtin_shufflevector(a, b, 0, 4, 1, 5);
}
template <typename V> inline V zip_high(V a, V b) {
  return __builtin_shufflevector(a, b, 2, 6, 3, 7);
}
#endif

// Transpose kLanes × kLanes numbers.
inline __attribute__((always_inline)) void transpose(Floats (&rows)[kLanes]) {
#pragma GCC unroll 4
  for (int step = 1; step < kLanes; step *= 2) {
    Floats next[kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < kLanes / 2; ++i) {
      next[2 * i] = zip_low(rows[i], rows[i + kLanes / 2]);
      next[2 * i + 1] = zip_high(rows[i], rows[i + kLanes / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i)
      rows[i] = next[i];
  }
}

// A vector whose number i is the sum of rows[i].
inline __attribute__((always_inline)) Floats sums_of(Floats (&rows)[kLanes]) {
#pragma GCC unroll 4
  for (int n = kLanes / 2; n > 0; n /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < n; ++i)
      rows[i] = zip_low(rows[i], rows[i + n]) + zip_high(rows[i], rows[i + n]);
  return rows[0];
}

// The vector with its halves, quarters … exchanged, to sum or compare all numbers in few steps.
template <int step> inline Floats exchange(Floats v) {
#if HALFMOON_LANES == 16
  if constexpr (step == 8)
    return __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  else if constexpr (step == 4)
    return __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  else if constexpr (step == 2)
    return __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  else
    return __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
#elif HALFMOON_LANES == 8
  if constexpr (step == 4)
    return __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3);
  else if constexpr (step == 2)
    return __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5);
  else
    return __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6);
#else
  if constexpr (step == 2)
    return __builtin_shufflevector(v, v, 2, 3, 0, 1);
  else
    return __builtin_shufflevector(v, v, 1, 0, 3, 2);
#endif
}

inline float largest(Floats v) {
  if constexpr (kLanes >= 16)
    v = larger(v, exchange<8>(v));
  if constexpr (kLanes >= 8)
    v = larger(v, exchange<4>(v));
  v = larger(v, exchange<2>(v));
  return larger(v, exchange<1>(v))[0];
}

inline float sum_all(Floats v) {
  if constexpr (kLanes >= 16)
    v += exchange<8>(v);
  if constexpr (kLanes >= 8)
    v += exchange<4>(v);
  v += exchange<2>(v);
  return (v + exchange<1>(v))[0];
}

}}} // namespace
