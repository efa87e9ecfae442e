#include "part_times.h"

namespace halfmoon {

const char *const kPartNames[kParts] = {
    "embedding", "norms", "qkv", "rotary", "kv_write", "attention",
    "out",       "up",    "down", "head",  "hooks",
};

void PartTimer::begin() {
  threads_ = thread_times();
  began_ns_ = now_ns();
}

void PartTimer::end() {
  int64_t passed = now_ns() - began_ns_;
  ThreadTimes now = thread_times();
  int64_t helped = now.helped_ns - threads_.helped_ns, waited = now.waited_ns - threads_.waited_ns;
  time_->seconds += static_cast<double>(passed) * 1e-9;
  time_->idle_seconds += static_cast<double>(threads() * passed - (passed - waited + helped)) * 1e-9;
}

} // namespace halfmoon
