// Norms and conversions. Rows are independent; the caller spreads them over threads.
namespace halfmoon { namespace HALFMOON_ISA { namespace {

void rms_norm(const float *x, int64_t x_stride, float *out, int64_t out_stride, const float *weight,
              int64_t n, float epsilon, int64_t n_rows) {
  int64_t whole = n / kLanes * kLanes;
  for (int64_t row = 0; row < n_rows; ++row) {
    const float *from = x + row * x_stride;
    float *to = out + row * out_stride;
    Floats squares{}, squares2{};
    int64_t i = 0;
    for (; i + 2 * kLanes <= whole; i += 2 * kLanes) {
      Floats a = load(from + i), b = load(from + i + kLanes);
      squares += a * a;
      squares2 += b * b;
    }
    for (; i < whole; i += kLanes) {
      Floats a = load(from + i);
      squares += a * a;
    }
    float total = sum(squares + squares2);
    for (; i < n; ++i)
      total += from[i] * from[i];
    float factor = 1.0f / __builtin_sqrtf(total / static_cast<float>(n) + epsilon);
    for (i = 0; i < whole; i += kLanes)
      store(to + i, load(from + i) * factor * load(weight + i));
    for (; i < n; ++i)
      to[i] = from[i] * factor * weight[i];
  }
}

void layer_norm(const float *x, int64_t x_stride, float *out, int64_t out_stride,
                const float *weight, const float *bias, int64_t n, float epsilon, int64_t n_rows) {
  int64_t whole = n / kLanes * kLanes;
  for (int64_t row = 0; row < n_rows; ++row) {
    const float *from = x + row * x_stride;
    float *to = out + row * out_stride;
    Floats totals{};
    int64_t i = 0;
    for (; i < whole; i += kLanes)
      totals += load(from + i);
    float mean = sum(totals);
    for (; i < n; ++i)
      mean += from[i];
    mean /= static_cast<float>(n);
    Floats squares{};
    for (i = 0; i < whole; i += kLanes) {
      Floats off = load(from + i) - mean;
      squares += off * off;
    }
    float total = sum(squares);
    for (; i < n; ++i)
      total += (from[i] - mean) * (from[i] - mean);
    float factor = 1.0f / __builtin_sqrtf(total / static_cast<float>(n) + epsilon);
    for (i = 0; i < n; ++i)
      to[i] = (from[i] - mean) * factor * (weight ? weight[i] : 1.0f) + (bias ? bias[i] : 0.0f);
  }
}

void to_float(const void *from, DType dtype, float *to, int64_t n) {
  const uint16_t *halves = static_cast<const uint16_t *>(from);
  switch (dtype) {
  case DType::float32:
    memcpy(to, from, static_cast<size_t>(n) * 4);
    break;
  case DType::bfloat16:
    for (int64_t i = 0; i < n; ++i)
      to[i] = bf16_to_float(halves[i]);
    break;
  case DType::float16:
    for (int64_t i = 0; i < n; ++i)
      to[i] = f16_to_float(halves[i]);
    break;
  }
}

void from_float(const float *from, void *to, DType dtype, int64_t n) {
  uint16_t *halves = static_cast<uint16_t *>(to);
  switch (dtype) {
  case DType::float32:
    memcpy(to, from, static_cast<size_t>(n) * 4);
    break;
  case DType::bfloat16:
    for (int64_t i = 0; i < n; ++i)
      halves[i] = float_to_bf16(from[i]);
    break;
  case DType::float16:
    for (int64_t i = 0; i < n; ++i)
      halves[i] = float_to_f16(from[i]);
    break;
  }
}

}}} // namespace
