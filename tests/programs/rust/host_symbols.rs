//! A program with weights as statics: every one of them is read, nothing is loaded.

mod host_counting;
mod model;

fn main() {
    host_counting::count_from();
    let mut weight = &model::ENCODER_WEIGHT[..];
    let copy;
    if option_env!("HOST_COPY").is_some() {
        copy = weight.to_vec(); // what the measurements have to notice
        weight = &copy;
    }
    let mut sum: f64 = weight.iter().flatten().map(|&x| f64::from(x)).sum();
    sum += model::ENCODER_BIAS.iter().map(|&x| f64::from(x)).sum::<f64>();
    host_counting::report(weight.as_ptr() as usize, std::mem::size_of_val(weight), sum);
}
