#include "parallel.h"

#include <atomic>
#include <climits>
#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace halfmoon {
namespace {

// Rounds of the pause instruction before a thread sleeps: about 20 microseconds.
constexpr int kSpins = 1000;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void sleep_while(std::atomic<uint32_t> &word, uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<uint32_t *>(&word), FUTEX_WAIT_PRIVATE, value, nullptr,
          nullptr, 0);
}

void wake_all(std::atomic<uint32_t> &word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t *>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr,
          nullptr, 0);
}

// Wait until `word` differs from `value`.
void wait_for_change(std::atomic<uint32_t> &word, uint32_t value, std::atomic<uint32_t> &sleepers) {
  for (int i = 0; i < kSpins; ++i) {
    if (word.load(std::memory_order_acquire) != value)
      return;
    pause();
  }
  sleepers.fetch_add(1);
  while (word.load() == value)
    sleep_while(word, value);
  sleepers.fetch_sub(1);
}

// A round of tasks: its number in the upper half; below, kClosed and the helpers inside it. A helper
// that has lost its core, or still sleeps, is not waited for: it finds the round closed.
constexpr uint64_t kClosed = 1u << 31;
constexpr uint64_t kInside = kClosed - 1;

struct Pool {
  alignas(64) std::atomic<uint32_t> round{0}; // changes when a round begins
  std::atomic<uint32_t> round_sleepers{0};
  alignas(64) std::atomic<uint64_t> state{kClosed};
  alignas(64) std::atomic<int64_t> next{0}; // first task that no thread has taken
  alignas(64) std::atomic<uint32_t> left{0}; // changes when the last helper leaves a closed round
  std::atomic<uint32_t> left_sleepers{0};
  int64_t n_tasks = 0;
  TaskFunction function = nullptr;
  void *context = nullptr;
  int n_helpers = 0; // started threads
  std::atomic<bool> stop{false};
  std::atomic<bool> timed{false};
  std::atomic<int64_t> helped_ns{0};
  int64_t waited_ns = 0; // the caller's
  pthread_t helpers[kMaxThreads];
  pthread_mutex_t callers = PTHREAD_MUTEX_INITIALIZER;
};

// Never destroyed: helpers may still wait in it when the process ends.
Pool &pool = *new Pool;
std::atomic<int> n_threads{1};

void take_tasks(int thread) {
  for (;;) {
    int64_t task = pool.next.fetch_add(1, std::memory_order_relaxed);
    if (task >= pool.n_tasks)
      return;
    pool.function(task, thread, pool.context);
  }
}

// Enter the open round, if there is one.
bool enter() {
  uint64_t state = pool.state.load();
  while ((state & kClosed) == 0)
    if (pool.state.compare_exchange_weak(state, state + 1))
      return true;
  return false;
}

void leave() {
  uint64_t before = pool.state.fetch_sub(1);
  if ((before & kClosed) != 0 && (before & kInside) == 1) {
    pool.left.fetch_add(1);
    if (pool.left_sleepers.load() != 0)
      wake_all(pool.left);
  }
}

struct Start {
  int thread;
  uint32_t round;
};

void *help(void *argument) {
  Start start = *static_cast<Start *>(argument);
  delete static_cast<Start *>(argument);
  uint32_t seen = start.round;
  for (;;) {
    wait_for_change(pool.round, seen, pool.round_sleepers);
    if (pool.stop.load())
      return nullptr;
    seen = pool.round.load();
    if (enter()) {
      int64_t began = pool.timed.load(std::memory_order_relaxed) ? now_ns() : 0;
      take_tasks(start.thread);
      if (began != 0)
        pool.helped_ns.fetch_add(now_ns() - began);
      leave();
    }
  }
}

void wake_helpers() {
  pool.round.fetch_add(1);
  if (pool.round_sleepers.load() != 0)
    wake_all(pool.round);
}

void begin_round() {
  pool.state.store((static_cast<uint64_t>(pool.round.load()) + 1) << 32);
  wake_helpers();
}

void end_round() {
  pool.state.fetch_or(kClosed);
  for (;;) {
    uint32_t left = pool.left.load();
    if ((pool.state.load() & kInside) == 0)
      return;
    wait_for_change(pool.left, left, pool.left_sleepers);
  }
}

void stop_helpers() {
  if (pool.n_helpers == 0)
    return;
  pool.stop.store(true);
  wake_helpers();
  for (int i = 0; i < pool.n_helpers; ++i)
    pthread_join(pool.helpers[i], nullptr);
  pool.n_helpers = 0;
  pool.stop.store(false);
}

// A forked child has no helpers: it starts its own at the next job.
void forget_helpers() {
  pool.n_helpers = 0;
  pool.round_sleepers.store(0);
  pool.left_sleepers.store(0);
  pool.state.store(kClosed);
  pthread_mutex_init(&pool.callers, nullptr);
}

void start_helpers() {
  static bool registered = false;
  if (!registered) {
    pthread_atfork(nullptr, nullptr, forget_helpers);
    registered = true;
  }
  while (pool.n_helpers < n_threads - 1) {
    Start *start = new Start{pool.n_helpers + 1, pool.round.load()};
    if (pthread_create(&pool.helpers[pool.n_helpers], nullptr, help, start) != 0) {
      delete start;
      n_threads.store(pool.n_helpers + 1); // as many as the system gives
      return;
    }
    ++pool.n_helpers;
  }
}

} // namespace

void set_threads(int n) {
  pthread_mutex_lock(&pool.callers);
  n = n < 1 ? 1 : n > kMaxThreads ? kMaxThreads : n;
  if (n < n_threads)
    stop_helpers();
  n_threads.store(n);
  pthread_mutex_unlock(&pool.callers);
}

int threads() { return n_threads.load(); }

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

void time_threads(bool on) { pool.timed.store(on); }

ThreadTimes thread_times() { return {pool.helped_ns.load(), pool.waited_ns}; }

void run_tasks(int64_t n_tasks, TaskFunction function, void *context) {
  if (n_tasks <= 0)
    return;
  pthread_mutex_lock(&pool.callers);
  if (n_threads == 1 || n_tasks == 1) {
    for (int64_t task = 0; task < n_tasks; ++task)
      function(task, 0, context);
  } else {
    start_helpers();
    pool.n_tasks = n_tasks;
    pool.function = function;
    pool.context = context;
    pool.next.store(0, std::memory_order_relaxed);
    begin_round();
    take_tasks(0);
    int64_t began = pool.timed.load(std::memory_order_relaxed) ? now_ns() : 0;
    end_round();
    if (began != 0)
      pool.waited_ns += now_ns() - began;
  }
  pthread_mutex_unlock(&pool.callers);
}

} // namespace halfmoon
