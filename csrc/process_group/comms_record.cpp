// Builds the record_param_comms event of a call in ProcessGroupNCCL's format, because tools that read traces (HTA,
// Chakra) expect exactly its fields and their order.
#include "process_group/comms_record.hpp"

namespace ark {

namespace {

// A template, so that members which a PyTorch minor lacks are not compiled.
template <typename Info>
constexpr bool kKnowsAsync = requires(Info info) {
  info.isAsynchronizedOp();
};

// The fields of a call's event. `rank` follows NCCL's "Rank": this rank, but the root of broadcast, reduce, gather and
// scatter, and the peer of send and recv. Element counts use root's size on every rank.
struct Shown {
  const CommsGroup& group;
  const Call& call;
  const bool is_p2p = c10d::isP2POp(call.type);
  const int rank = is_p2p ? call.peer : call.root >= 0 ? static_cast<int>(call.root) : group.rank;
  const int64_t inputs = call.inputs.elements(), outputs = call.outputs.elements();
  const int64_t input_elements = call.kind == Kind::scatter ? outputs * group.size : inputs;
  const int64_t output_elements = call.kind == Kind::gather ? inputs * group.size : outputs;
};

template <typename Info>
std::shared_ptr<Info> make_info(const Shown& shown, int64_t sequence, const std::vector<int64_t>& in_splits,
                                const std::vector<int64_t>& out_splits) {
  std::shared_ptr<Info> info;
  const CommsGroup& group = shown.group;
  const auto build = [&](auto... async) {
    return std::make_shared<Info>(group.name, shown.rank, std::string(shown.call.event), shown.input_elements,
                                  shown.output_elements, shown.call.dtype(), in_splits, out_splits,
                                  group.global_rank_start, group.global_rank_stride, group.size, async...);
  };
  if constexpr (kKnowsAsync<Info>) {
    info = build(shown.call.async);
  } else {
    info = build();
  }
  if constexpr (requires(Info told) { told.setSequenceInfo(int64_t{}, bool{}); }) {
    info->setSequenceInfo(sequence, shown.is_p2p);
  }
  return info;
}

}  // namespace

void CommsRecord::start(const CommsGroup& group, const Call& call, int64_t sequence, at::StepCallbacks&& callbacks) {
  const Shown shown{group, call};
  c10::IValue inputs = call.inputs.value();
  static const std::vector<int64_t> none;
  const auto& in_splits = call.input_splits ? *call.input_splits : none;
  const auto& out_splits = call.output_splits ? *call.output_splits : none;
  info_.emplace(c10::DebugInfoKind::PARAM_COMMS_INFO,
                make_info<torch::ParamCommsDebugInfo>(shown, sequence, in_splits, out_splits));
  annotation_.emplace(at::RecordScope::USER_SCOPE);
  if (annotation_->isActive()) {
    annotation_->_setAsync();  // as NCCL does: an operation may end on another thread
    annotation_->before("ark:" + std::string(call.name), c10::ArrayRef<const c10::IValue>(&inputs, 1));
  }
  event_.emplace(std::move(callbacks));
  if (event_->needsInputs()) {
    // The list that readers of ExecutionTraceObserver expect from ProcessGroupNCCL, in the same order.
    std::vector<c10::IValue> list{std::move(inputs),
                                  std::make_tuple(sequence, shown.is_p2p),
                                  group.name,
                                  shown.rank,
                                  std::string(call.event),
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
  if (event_->needsOutputs()) event_->setOutputs(std::vector<c10::IValue>{call.outputs.value()});
}

}  // namespace ark
