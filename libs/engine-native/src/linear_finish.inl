// What follows the sums: bias, activation, gate, residual.
namespace halfmoon { namespace HALFMOON_ISA { namespace {

// erf(x) by Abramowitz and Stegun 7.1.26; absolute error below 2e-7 in float32.
inline Floats erf(Floats x) {
  Floats size = x < 0.0f ? -x : x;
  Floats t = 1.0f / (1.0f + 0.3275911f * size);
  Floats p = ((((1.061405429f * t - 1.453152027f) * t) + 1.421413741f) * t - 0.284496736f) * t +
             0.254829592f;
  Floats y = 1.0f - p * t * exp(-size * size);
  return x < 0.0f ? -y : y;
}

inline Floats activate(Floats x, Activation activation) {
  switch (activation) {
  case Activation::none:
    return x;
  case Activation::silu:
    return x / (1.0f + exp(-x));
  case Activation::gelu_tanh: {
    // 0.5·(1 + tanh(z)) = 1 / (1 + e^{-2z})
    Floats z = 0.7978845608f * (x + 0.044715f * x * x * x);
    return x / (1.0f + exp(-2.0f * z));
  }
  case Activation::gelu:
    return 0.5f * x * (1.0f + erf(x * 0.70710678f));
  case Activation::relu:
    return x < 0.0f ? Floats{} : x;
  case Activation::relu2:
    return x < 0.0f ? Floats{} : x * x;
  }
  return x;
}

inline void put(const LinearCall &call, float *y, Floats result, int64_t n_columns) {
  result *= call.multiplier;
  if (n_columns >= kLanes) {
    store(y, call.accumulate ? load(y) + result : result);
    return;
  }
  for (int64_t i = 0; i < n_columns; ++i)
    y[i] = call.accumulate ? y[i] + result[i] : result[i];
}

// Fetch the lines of y that `finish` will write, while the last sums are computed.
inline void prefetch_results(const LinearCall &call, const Packed &w, int64_t panel, int64_t row,
                             int64_t n_rows) {
  const float *y = call.y + row * call.y_stride + panel * w.columns();
  for (int64_t r = 0; r < n_rows; ++r, y += call.y_stride) {
    __builtin_prefetch(y, 1);
    if (!w.gated)
      __builtin_prefetch(y + kLanes, 1);
  }
}

// Store the sums [n_rows][kPanelOutputs] of a panel as columns of y from `row` on.
void finish(const LinearCall &call, const Packed &w, int64_t panel, int64_t row, int64_t n_rows,
            const float *sums) {
  int64_t column = panel * w.columns(), n_columns = w.n_columns() - column;
  Floats left_bias{}, right_bias{};
  if (w.bias) {
    left_bias = load(w.bias + panel * kPanelOutputs);
    right_bias = load(w.bias + panel * kPanelOutputs + kLanes);
  }
  for (int64_t r = 0; r < n_rows; ++r) {
    float *y = call.y + (row + r) * call.y_stride + column;
    Floats left = load(sums + r * kPanelOutputs) + left_bias;
    Floats right = load(sums + r * kPanelOutputs + kLanes) + right_bias;
    left = activate(left, call.activation);
    if (w.gated) {
      put(call, y, left * right, n_columns);
      continue;
    }
    put(call, y, left, n_columns);
    if (n_columns > kLanes)
      put(call, y + kLanes, activate(right, call.activation), n_columns - kLanes);
  }
}

}}} // namespace
