// Weights in panels: kPanelOutputs outputs side by side, so that a kernel reads them in one stream.
//
// A panel holds its outputs' weights of input 0, then of input 1, and so on to n_in. Of a gated
// linear the first kLanes outputs of a panel are gates and the others the ups of the same columns:
// one row's gate and up come out of one block. bfloat16 weights lie in pairs of inputs in a 32-bit
// word, the even one in its lower half. Weights keep their size; the last panel is padded by zeros.
namespace halfmoon { namespace HALFMOON_ISA { namespace {

constexpr int kPanelOutputs = 2 * kLanes;

struct Packed {
  char *weights; // [n_panels] of panel_bytes
  float *bias;   // [n_panels][kPanelOutputs], or nullptr
  DType dtype;
  int64_t n_out, n_in, n_panels, panel_bytes;
  bool gated;

  // Columns of y in a panel.
  int64_t columns() const { return gated ? kLanes : kPanelOutputs; }
  int64_t n_columns() const { return gated ? n_out / 2 : n_out; }
  size_t n_bytes() const { return static_cast<size_t>(n_panels * panel_bytes); }
  size_t bias_bytes() const { return static_cast<size_t>(n_panels * kPanelOutputs) * 4; }
  // Row of the weights that is output `i` of a panel; -1: padding.
  int64_t row_of(int64_t panel, int i) const {
    int64_t column = panel * columns() + (gated ? i % kLanes : i);
    if (column >= n_columns())
      return -1;
    return gated && i >= kLanes ? n_out / 2 + column : column;
  }
};

inline Packed *of(PackedLinear *packed) { return reinterpret_cast<Packed *>(packed); }
inline const Packed *of(const PackedLinear *packed) {
  return reinterpret_cast<const Packed *>(packed);
}

// Bytes of one panel, or -1 where they overflow.
inline int64_t bytes_of_panel(DType dtype, int64_t n_in) {
  int64_t steps = dtype == DType::bfloat16 ? n_in / 2 + n_in % 2 : n_in, n_bytes;
  if (__builtin_mul_overflow(steps, kPanelOutputs * (dtype == DType::float16 ? 2 : 4), &n_bytes))
    return -1;
  return n_bytes;
}

// Copy one row of weights to output `i` of a panel: element k of the row to place k·stride of it.
template <typename T> void spread_row(const T *row, T *to, int64_t from, int64_t end, int64_t stride) {
  for (int64_t k = from; k < end; ++k)
    to[k * stride] = row ? row[k] : T{0};
}

void spread_pairs(const uint16_t *row, uint32_t *to, int64_t from, int64_t end, int64_t n_in) {
  for (int64_t k = from; k < end; k += 2) {
    uint32_t even = row ? row[k] : 0, odd = row && k + 1 < n_in ? row[k + 1] : 0;
    to[k / 2 * kPanelOutputs] = even | odd << 16;
  }
}

void pack_panel(const Packed &packed, const char *weights, int64_t row_stride, int64_t panel) {
  constexpr int64_t kPart = 64; // inputs at a time: their lines of the panel stay in the cache
  char *to = packed.weights + panel * packed.panel_bytes;
  int64_t size = static_cast<int64_t>(size_of(packed.dtype));
  for (int64_t from = 0; from < packed.n_in; from += kPart) {
    int64_t end = from + kPart < packed.n_in ? from + kPart : packed.n_in;
    for (int i = 0; i < kPanelOutputs; ++i) {
      int64_t row = packed.row_of(panel, i);
      const char *at = row < 0 ? nullptr : weights + row * row_stride * size;
      if (packed.dtype == DType::float32)
        spread_row(reinterpret_cast<const uint32_t *>(at), reinterpret_cast<uint32_t *>(to) + i,
                   from, end, kPanelOutputs);
      else if (packed.dtype == DType::float16)
        spread_row(reinterpret_cast<const uint16_t *>(at), reinterpret_cast<uint16_t *>(to) + i,
                   from, end, kPanelOutputs);
      else
        spread_pairs(reinterpret_cast<const uint16_t *>(at), reinterpret_cast<uint32_t *>(to) + i,
                     from, end, packed.n_in);
    }
  }
}

void free_linear(PackedLinear *linear) {
  if (!linear)
    return;
  Packed *packed = of(linear);
  free_buffer(packed->weights, packed->n_bytes());
  free_buffer(packed->bias, packed->bias_bytes());
  free(packed);
}

PackedLinear *pack_linear(const void *weights, DType dtype, int64_t n_out, int64_t n_in,
                          int64_t row_stride, const float *bias, bool gated) {
  int64_t columns = gated ? kLanes : kPanelOutputs, n_columns = gated ? n_out / 2 : n_out;
  int64_t n_panels = n_columns / columns + (n_columns % columns != 0), n_bytes;
  int64_t panel_bytes = bytes_of_panel(dtype, n_in);
  if (panel_bytes < 0 || __builtin_mul_overflow(n_panels, panel_bytes, &n_bytes))
    return nullptr;
  Packed *packed = static_cast<Packed *>(malloc(sizeof(Packed)));
  if (!packed)
    return nullptr;
  *packed = {nullptr, nullptr, dtype, n_out, n_in, n_panels, panel_bytes, gated};
  packed->weights = static_cast<char *>(allocate_buffer(packed->n_bytes()));
  if (bias)
    packed->bias = static_cast<float *>(allocate_buffer(packed->bias_bytes()));
  if (!packed->weights || (bias && !packed->bias)) {
    free_linear(reinterpret_cast<PackedLinear *>(packed));
    return nullptr;
  }
  parallel_for(n_panels, [&](int64_t panel, int) {
    pack_panel(*packed, static_cast<const char *>(weights), row_stride, panel);
    for (int i = 0; bias && i < kPanelOutputs; ++i) {
      int64_t row = packed->row_of(panel, i);
      packed->bias[panel * kPanelOutputs + i] = row < 0 ? 0.0f : bias[row];
    }
  });
  return reinterpret_cast<PackedLinear *>(packed);
}

size_t linear_bytes(const PackedLinear *packed) {
  return of(packed)->n_bytes() + (of(packed)->bias ? of(packed)->bias_bytes() : 0);
}

}}} // namespace
