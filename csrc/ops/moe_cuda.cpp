#include "ops/moe.hpp"
namespace ark::ops {
MoeDispatched moe_dispatch_cuda(const MoeDispatch& call, ProcessGroupArk& group) { return moe_dispatch_cpu(call, group); }
at::Tensor moe_scatter_cuda(const MoeRows& call, ProcessGroupArk& group){ return moe_scatter_cpu(call, group); }
at::Tensor moe_gather_cuda(const MoeRows& call, ProcessGroupArk& group){ return moe_gather_cpu(call, group); }
}
