// Run tasks over a fixed set of threads.
//
// Tasks are taken one by one from a shared counter, so that a thread that lost its core delays one
// task and not a fixed share of the work: several workers usually share a machine's cores.
// Waiting threads spin for microseconds, then sleep.
#pragma once

#include <cstdint>

namespace halfmoon {

using TaskFunction = void (*)(int64_t task, int thread, void *context);

// Use `n` threads from now on, the caller included; at least 1, at most kMaxThreads.
void set_threads(int n);
int threads();
constexpr int kMaxThreads = 256;

// Run `function` for tasks 0 … n_tasks-1 and return when all have ended. One caller at a time
// (callers of other threads wait). `thread` is 0 … threads()-1: index of per-thread scratch.
void run_tasks(int64_t n_tasks, TaskFunction function, void *context);

// What threads did in rounds of tasks while `time_threads` was on.
struct ThreadTimes {
  int64_t helped_ns; // computing, of all threads but the caller
  int64_t waited_ns; // of the caller, for the last of the others
};
void time_threads(bool on);
ThreadTimes thread_times();
int64_t now_ns();

template <typename F> inline void parallel_for(int64_t n_tasks, F &&f) {
  run_tasks(
      n_tasks,
      [](int64_t task, int thread, void *context) {
        (*static_cast<F *>(context))(task, thread);
      },
      const_cast<void *>(static_cast<const void *>(&f)));
}

} // namespace halfmoon
