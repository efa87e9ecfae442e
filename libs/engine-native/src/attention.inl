// Paged attention and the KV write.
#include "kv_numbers.inl"
#include "attention_softmax.inl"
#include "attention_plan.inl"
#include "attention_few.inl"
#include "attention_many.inl"
#include "kv_write.inl"

namespace halfmoon { namespace HALFMOON_ISA { namespace {

template <DType dtype> void attend_pages(const Plan &plan) {
  parallel_for(plan.n_tasks, [&](int64_t index, int thread) {
    const Task &task = plan.tasks[index];
    if (task.few)
      attend_few<dtype>(plan, task, thread_scratch[thread]);
    else
      attend_many<dtype>(plan, task, thread_scratch[thread]);
  });
}

void attend(const AttentionCall &call) {
  Plan plan = make_plan(call);
  switch (call.pool.dtype) {
  case DType::float32:
    return attend_pages<DType::float32>(plan);
  case DType::bfloat16:
    return attend_pages<DType::bfloat16>(plan);
  case DType::float16:
    return attend_pages<DType::float16>(plan);
  }
}

}}} // namespace
