// Time the parts of a forward, where a caller asks for it.
//
// A part's time is the calling thread's. Beside it stands the time that all threads together had
// nothing to do meanwhile: of n threads, n times the part's time less what they computed.
#pragma once

#include "parallel.h"

#include <cstdint>

namespace halfmoon {

enum class Part : int32_t {
  embedding,
  norms,
  qkv,
  rotary, // norms of heads, too
  kv_write,
  attention,
  out,
  up, // its activation, too
  down,
  head,
  hooks,
};
constexpr int kParts = 11;
extern const char *const kPartNames[kParts];

struct PartTime {
  double seconds;
  double idle_seconds;
};

// Adds the time from its construction to its end to a part; without `times` it reads no clock.
class PartTimer {
public:
  PartTimer(PartTime *times, Part part) : time_(times ? times + static_cast<int>(part) : nullptr) {
    if (time_)
      begin();
  }
  ~PartTimer() {
    if (time_)
      end();
  }
  PartTimer(const PartTimer &) = delete;
  PartTimer &operator=(const PartTimer &) = delete;

private:
  void begin();
  void end();

  PartTime *time_;
  int64_t began_ns_ = 0;
  ThreadTimes threads_{};
};

} // namespace halfmoon
