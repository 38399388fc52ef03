// See comms_record.hpp.
#include "process_group/comms_record.hpp"

namespace ark {

namespace {

// Templates, so that what one PyTorch minor lacks is discarded and not compiled.
template <typename Info>
constexpr bool kKnowsAsync = requires(Info info) {
  info.isAsynchronizedOp();
};

template <typename Info>
std::shared_ptr<Info> make_info(const CommsGroup& group, const CommsCall& call, const std::vector<int64_t>& in_splits,
                                const std::vector<int64_t>& out_splits) {
  std::shared_ptr<Info> info;
  const auto build = [&](auto... async) {
    return std::make_shared<Info>(group.name, call.rank, std::string(call.name), call.input_elements,
                                  call.output_elements, call.dtype, in_splits, out_splits, group.global_rank_start,
                                  group.global_rank_stride, group.size, async...);
  };
  if constexpr (kKnowsAsync<Info>) {
    info = build(call.async);
  } else {
    info = build();
  }
  if constexpr (requires(Info shown) { shown.setSequenceInfo(int64_t{}, bool{}); }) {
    info->setSequenceInfo(call.sequence, call.is_p2p);
  }
  return info;
}

}  // namespace

void CommsRecord::start(const CommsGroup& group, CommsCall call, at::StepCallbacks&& callbacks) {
  static const std::vector<int64_t> none;
  const auto& in_splits = call.input_splits ? *call.input_splits : none;
  const auto& out_splits = call.output_splits ? *call.output_splits : none;
  info_.emplace(c10::DebugInfoKind::PARAM_COMMS_INFO,
                make_info<torch::ParamCommsDebugInfo>(group, call, in_splits, out_splits));
  annotation_.emplace(at::RecordScope::USER_SCOPE);
  if (annotation_->isActive()) {
    annotation_->_setAsync();  // as NCCL's: an operation may end on another thread
    annotation_->before("ark:" + std::string(call.title), c10::ArrayRef<const c10::IValue>(&call.inputs, 1));
  }
  event_.emplace(std::move(callbacks));
  if (event_->needsInputs()) {
    // The list that ExecutionTraceObserver's readers expect from ProcessGroupNCCL, in its order.
    std::vector<c10::IValue> list{std::move(call.inputs),
                                  std::make_tuple(call.sequence, call.is_p2p),
                                  group.name,
                                  call.rank,
                                  std::string(call.name),
                                  in_splits,
                                  out_splits,
                                  group.global_rank_start,
                                  group.global_rank_stride,
                                  group.size};
    if (kKnowsAsync<torch::ParamCommsDebugInfo>) list.emplace_back(call.async);
    event_->before(at::kParamCommsCallName, c10::ArrayRef<const c10::IValue>(list.data(), list.size()));
  } else {
    event_->before(at::kParamCommsCallName);
  }
  if (event_->needsOutputs()) event_->setOutputs(std::vector<c10::IValue>{std::move(call.outputs)});
}

}  // namespace ark
