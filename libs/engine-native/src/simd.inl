// Vectors of HALFMOON_LANES floats, as the compiler's vector extension has them.
namespace halfmoon { namespace HALFMOON_ISA { namespace {

constexpr int kLanes = HALFMOON_LANES;
typedef float Floats __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2), aligned(2), may_alias));

inline Floats load(const float *p) { return *reinterpret_cast<const Floats *>(p); }
inline void store(float *p, Floats v) { *reinterpret_cast<Floats *>(p) = v; }
inline Floats spread(float x) { return Floats{} + x; }

inline float bf16_to_float(uint16_t h) {
  uint32_t word = static_cast<uint32_t>(h) << 16;
  float x;
  memcpy(&x, &word, 4);
  return x;
}
inline uint16_t float_to_bf16(float x) {
  uint32_t word;
  memcpy(&word, &x, 4);
  if ((word & 0x7fffffffu) > 0x7f800000u)
    return static_cast<uint16_t>((word >> 16) | 0x40u); // a quiet NaN
  return static_cast<uint16_t>((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
}
#if defined(__aarch64__)
typedef __fp16 Half; // g++ 12 lacks _Float16 there
#else
typedef _Float16 Half;
#endif
inline float f16_to_float(uint16_t h) {
  Half x;
  memcpy(&x, &h, 2);
  return static_cast<float>(x);
}
inline uint16_t float_to_f16(float x) {
  Half y = static_cast<Half>(x);
  uint16_t h;
  memcpy(&h, &y, 2);
  return h;
}

// Load kLanes bfloat16 numbers.
inline Floats load_bf16(const uint16_t *p) {
  Words words = __builtin_convertvector(*reinterpret_cast<const Halves *>(p), Words) << 16;
  return reinterpret_cast<Floats &>(words);
}

inline float sum(Floats v) {
  float total = 0;
  for (int i = 0; i < kLanes; ++i)
    total += v[i];
  return total;
}

// exp(x) for x ≤ 88; 0 below -87. Relative error below 2e-7 (Cody-Waite reduction, degree 6).
inline Floats exp(Floats x) {
  Floats low = spread(-87.33f), high = spread(88.37f);
  x = x > low ? x : low;
  x = x < high ? x : high;
  Floats scaled = x * 1.44269504088896341f;
  // Round to the nearest integer by adding and removing 1.5·2^23.
  Floats rounded = (scaled + 12582912.0f) - 12582912.0f;
  Floats r = x - rounded * 0.693359375f;
  r = r - rounded * -2.12194440e-4f;
  Floats p = spread(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  Ints exponent = (__builtin_convertvector(rounded, Ints) + 127) << 23;
  return p * reinterpret_cast<Floats &>(exponent);
}

// Relative error below 1e-6, of small x too: a large soft cap multiplies by what it divided by.
inline Floats tanh(Floats x) {
  Floats squared = x * x;
  // The odd series up to x^9.
  Floats p = spread(62.0f / 2835.0f);
  p = p * squared - 17.0f / 315.0f;
  p = p * squared + 2.0f / 15.0f;
  p = p * squared - 1.0f / 3.0f;
  Floats small = x + x * squared * p;
  // 1 - 2 / (e^{2x} + 1)
  Floats large = 1.0f - 2.0f / (exp(x * 2.0f) + 1.0f);
  return squared < spread(0.0625f) ? small : large;
}

}}} // namespace
