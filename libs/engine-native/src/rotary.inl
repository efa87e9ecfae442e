// Rotary position embedding of one token's heads.
namespace halfmoon { namespace HALFMOON_ISA { namespace {

// Turn the first 2·n_pairs numbers of each head by the angles of one position. Pairs are
// (i, i + n_pairs), or (2i, 2i + 1) where interleaved.
void rotate(float *heads, int64_t n_heads, int64_t head_dim, const float *cosines,
            const float *sines, int64_t n_pairs, bool interleaved) {
  for (int64_t h = 0; h < n_heads; ++h) {
    float *head = heads + h * head_dim;
    if (interleaved) {
      for (int64_t i = 0; i < n_pairs; ++i) {
        float a = head[2 * i], b = head[2 * i + 1];
        head[2 * i] = a * cosines[i] - b * sines[i];
        head[2 * i + 1] = b * cosines[i] + a * sines[i];
      }
      continue;
    }
    float *first = head, *second = head + n_pairs;
    int64_t i = 0;
    for (; i + kLanes <= n_pairs; i += kLanes) {
      Floats a = load(first + i), b = load(second + i);
      Floats c = load(cosines + i), s = load(sines + i);
      store(first + i, a * c - b * s);
      store(second + i, b * c + a * s);
    }
    for (; i < n_pairs; ++i) {
      float a = first[i], b = second[i];
      first[i] = a * cosines[i] - b * sines[i];
      second[i] = b * cosines[i] + a * sines[i];
    }
  }
}

}}} // namespace
