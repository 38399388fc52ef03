// On CUDA tensors, by PyTorch's product. Unfused: as a whole, straight into memory that the group has registered, where
// it has any, and the group's collective from there to the result; nothing is copied in between. Overlapped: in parts,
// one a rank, while others travel: rows that a peer adds are multiplied before this rank's own; of gathered rows, this
// rank's own are multiplied first. One kernel that does both: matmul_fused.cpp.
#include <c10/core/DeviceGuard.h>

#include "ops/matmul.hpp"
#include "process_group/cuda_group.hpp"

namespace ark::ops {

namespace {

class Products {
 public:
  Products(const MatmulCall& call, ProcessGroupArk& group)
      : call_(call),
        group_(group),
        size_(group.getSize()),
        rank_(group.getRank()),
        capturing_(is_capturing(device())) {}

  at::Tensor all_reduce() const {
    if (is_in_parts() && call_.rows() % size_ == 0) {
      at::Tensor out = place(call_.rows(), call_.columns());
      const int64_t each = call_.rows() / size_;
      at::Tensor mine = out.narrow(0, rank_ * each, each);
      reduce_in_parts(mine);
      gather(out, mine, false)->wait();
      return out;
    }
    at::Tensor out = place(call_.rows(), call_.columns());
    at::mm_out(out, call_.a, call_.b);
    Tensors tensors{out};
    c10d::AllreduceOptions options;
    options.asyncOp = false;
    group_.allreduce(tensors, options)->wait();
    return out;
  }

  at::Tensor reduce_scatter() const {
    at::Tensor out = place(call_.rows() / size_, call_.columns());
    if (is_in_parts()) {
      reduce_in_parts(out);
      return out;
    }
    at::Tensor product = place(call_.rows(), call_.columns());
    at::mm_out(product, call_.a, call_.b);
    c10d::ReduceScatterOptions options;
    options.asyncOp = false;
    group_._reduce_scatter_base(out, product, options)->wait();
    return out;
  }

  MatmulResult all_gather() const {
    at::Tensor gathered = place(size_ * call_.rows(), call_.depth()), mine = call_.a.contiguous();
    const bool in_parts = is_in_parts();
    const auto gathering = gather(gathered, mine, in_parts);
    const at::Tensor none = at::empty({0}, call_.a.options());
    if (!in_parts) {
      gathering->wait();
      return {at::mm(gathered, call_.b), call_.gathered ? gathered : none};
    }
    at::Tensor out = at::empty({size_ * call_.rows(), call_.columns()}, call_.a.options());
    const int64_t begin = rank_ * call_.rows(), end = begin + call_.rows();
    const auto multiply = [&](const at::Tensor& from, int64_t first) {
      if (from.size(0) == 0) return;
      at::Tensor to = out.narrow(0, first, from.size(0));
      at::mm_out(to, from, call_.b);
    };
    multiply(mine, begin);
    gathering->wait();
    multiply(gathered.narrow(0, 0, begin), 0);
    multiply(gathered.narrow(0, end, gathered.size(0) - end), end);
    return {out, call_.gathered ? gathered : none};
  }

 private:
  c10::Device device() const { return call_.a.device(); }
  // From what all ranks share alone.
  bool is_in_parts() const {
    const int64_t shared = call_.kind == MatmulKind::all_gather ? call_.depth() : call_.columns();
    return call_.form == "overlapped" && call_.rows() >= size_ && shared != 0;
  }

  // A graph's tensors come from its own pool.
  at::Tensor place(int64_t rows, int64_t columns) const {
    const int64_t sizes[] = {rows, columns};
    at::Tensor made;
    if (!capturing_) made = group_.allocate_registered(sizes, call_.a.scalar_type(), device());
    return made.defined() ? made : at::empty(sizes, call_.a.options());
  }

  ProcessGroupArk::WorkPtr gather(at::Tensor& gathered, at::Tensor& mine, bool async) const {
    c10d::AllgatherOptions options;
    options.asyncOp = async;
    return group_._allgather_base(gathered, mine, options);
  }

  // This rank's part of the rows, added in rank order.
  void reduce_in_parts(at::Tensor& out) const {
    const int64_t each = call_.rows() / size_;
    std::vector<at::Tensor> parts(static_cast<size_t>(size_)), sent;
    std::vector<ProcessGroupArk::WorkPtr> works;
    c10d::AllToAllOptions options;
    options.asyncOp = true;
    for (int64_t step = 1; step <= size_; ++step) {
      const int64_t to = (rank_ + step) % size_, from = (rank_ + size_ - step) % size_;
      at::Tensor product = place(each, call_.columns());
      at::mm_out(product, call_.a.narrow(0, to * each, each), call_.b);
      if (to == rank_) {
        parts[to] = product;
        break;
      }
      std::vector<int64_t> outgoing(static_cast<size_t>(size_)), incoming(static_cast<size_t>(size_));
      outgoing[to] = incoming[from] = each;
      parts[from] = place(each, call_.columns());
      works.push_back(group_.alltoall_base(parts[from], product, incoming, outgoing, options));
      sent.push_back(product);  // until it has left
    }
    for (const auto& work : works) work->wait();
    if (size_ == 2) {
      at::add_out(out, parts[0], parts[1]);
      return;
    }
    const bool wide = out.scalar_type() == at::kDouble || out.scalar_type() == at::kFloat;
    at::Tensor total = parts[0].to(wide ? out.scalar_type() : at::kFloat, false, /*copy=*/true);
    for (int64_t r = 1; r < size_; ++r) total.add_(parts[r]);
    out.copy_(total);
  }

  const MatmulCall& call_;
  ProcessGroupArk& group_;
  const int64_t size_, rank_;
  const bool capturing_;
};

}  // namespace

MatmulResult matmul_cuda(const MatmulCall& call, ProcessGroupArk& group) {
  const c10::OptionalDeviceGuard guard(call.a.device());
  const Products products(call, group);
  const at::Tensor none = at::empty({0}, call.a.options());
  switch (call.kind) {
    case MatmulKind::all_reduce: return {products.all_reduce(), none};
    case MatmulKind::reduce_scatter: return {products.reduce_scatter(), none};
    default: return products.all_gather();
  }
}

}  // namespace ark::ops
