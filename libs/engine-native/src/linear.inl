// Packed linears.
namespace halfmoon { namespace HALFMOON_ISA { namespace {

struct Packed {
  float *weights; // [n_out, n_in]
  float *bias;
  int64_t n_out, n_in;
  bool gated;
};

Packed *of(PackedLinear *packed) { return reinterpret_cast<Packed *>(packed); }
const Packed *of(const PackedLinear *packed) { return reinterpret_cast<const Packed *>(packed); }

PackedLinear *pack_linear(const void *weights, DType dtype, int64_t n_out, int64_t n_in,
                          int64_t row_stride, const float *bias, bool gated) {
  Packed *packed = static_cast<Packed *>(malloc(sizeof(Packed)));
  if (!packed)
    return nullptr;
  *packed = {static_cast<float *>(malloc(static_cast<size_t>(n_out * n_in) * 4)), nullptr, n_out,
             n_in, gated};
  if (bias) {
    packed->bias = static_cast<float *>(malloc(static_cast<size_t>(n_out) * 4));
    memcpy(packed->bias, bias, static_cast<size_t>(n_out) * 4);
  }
  for (int64_t o = 0; o < n_out; ++o)
    to_float(static_cast<const char *>(weights) + o * row_stride * static_cast<int64_t>(size_of(dtype)),
             dtype, packed->weights + o * n_in, n_in);
  return reinterpret_cast<PackedLinear *>(packed);
}

void free_linear(PackedLinear *packed) {
  if (!packed)
    return;
  free(of(packed)->weights);
  free(of(packed)->bias);
  free(packed);
}

size_t linear_bytes(const PackedLinear *packed) {
  return static_cast<size_t>(of(packed)->n_out * of(packed)->n_in) * 4;
}

float activate(float x, Activation activation) {
  switch (activation) {
  case Activation::none:
    return x;
  case Activation::silu:
    return x / (1.0f + __builtin_expf(-x));
  case Activation::gelu_tanh:
    return 0.5f * x * (1.0f + __builtin_tanhf(0.7978845608f * (x + 0.044715f * x * x * x)));
  case Activation::gelu:
    return 0.5f * x * (1.0f + __builtin_erff(x * 0.70710678f));
  case Activation::relu:
    return x > 0 ? x : 0;
  case Activation::relu2:
    return x > 0 ? x * x : 0;
  }
  return x;
}

float row_product(const Packed &w, const float *x, int64_t o) {
  float total = w.bias ? w.bias[o] : 0.0f;
  for (int64_t i = 0; i < w.n_in; ++i)
    total += x[i] * w.weights[o * w.n_in + i];
  return total;
}

void linear(const LinearCall &call) {
  const Packed &w = *of(call.weights);
  int64_t half = w.n_out / 2, n_out = w.gated ? half : w.n_out;
  parallel_for(n_out, [&](int64_t o, int) {
    for (int64_t r = 0; r < call.n_rows; ++r) {
      const float *x = call.x + r * call.x_stride;
      float result = activate(row_product(w, x, o), call.activation);
      if (w.gated)
        result *= row_product(w, x, half + o);
      float *y = call.y + r * call.y_stride + o;
      *y = call.multiplier * result + (call.accumulate ? *y : 0.0f);
    }
  });
}

void linear_unpacked(const void *weights, DType dtype, int64_t n_out, int64_t n_in, const float *x,
                     int64_t x_stride, int64_t n_rows, float *y, int64_t y_stride) {
  parallel_for(n_out, [&](int64_t o, int) {
    float *row = static_cast<float *>(malloc(static_cast<size_t>(n_in) * 4));
    to_float(static_cast<const char *>(weights) + o * n_in * static_cast<int64_t>(size_of(dtype)),
             dtype, row, n_in);
    for (int64_t r = 0; r < n_rows; ++r) {
      float total = 0;
      for (int64_t i = 0; i < n_in; ++i)
        total += x[r * x_stride + i] * row[i];
      y[r * y_stride + o] = total;
    }
    free(row);
  });
}

}}} // namespace
