namespace halfmoon { namespace HALFMOON_ISA {

#define HALFMOON_TEXT(x) #x
#define HALFMOON_NAME(x) HALFMOON_TEXT(x)

const Kernels *table() {
  static const Kernels kernels = {
      HALFMOON_NAME(HALFMOON_ISA), pack_linear, free_linear, linear_bytes, linear,
      linear_unpacked,             attend,      write_kv,    rms_norm,     layer_norm,
      rotate,                      to_float,    from_float,   draw_token,   score_token,
  };
  return &kernels;
}

}} // namespace
